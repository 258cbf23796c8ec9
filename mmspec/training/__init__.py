"""Training of drafters for any target."""
