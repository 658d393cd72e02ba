"""Data: sources, columns, tasks, partitions, splits, packaged assets, and a first experiment for somebody's file."""
