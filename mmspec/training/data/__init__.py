"""Data that drafters are trained on."""
