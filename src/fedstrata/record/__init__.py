"""What a run leaves behind: files that survive a kill, the checkpoint, failures as data."""
