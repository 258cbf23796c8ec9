"""Losses of drafters."""
