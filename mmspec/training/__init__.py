"""Training of drafters and draft models for any target."""
