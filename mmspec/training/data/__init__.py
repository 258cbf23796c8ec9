"""Training data of drafters."""
