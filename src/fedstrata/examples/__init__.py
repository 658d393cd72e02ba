"""Ready experiments, installed with the package."""
