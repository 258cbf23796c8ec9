"""Training and scores of the reference models in assets/. Runs from a clone; not installed."""
