"""Training of the reference models."""
