"""Losses of drafting heads."""
