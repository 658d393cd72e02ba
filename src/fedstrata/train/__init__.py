"""The torch edge: models and strata, LoRA pairs at each client's own rank, local training, evaluation, folders."""
