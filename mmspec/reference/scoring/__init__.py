"""Scores of the reference models, and their cards."""
