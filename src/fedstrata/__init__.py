"""Federated fine-tuning, stratum by stratum."""

__version__ = "0.1.0.dev0"
