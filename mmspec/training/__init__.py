"""Training: the reference models, and the drafters for any target."""
