"""Training, scores and cards of the reference models in assets/; run from a clone, not installed."""
