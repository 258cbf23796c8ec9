"""Training, scores and model cards of the reference models in assets/. Runs from a clone; not installed."""
