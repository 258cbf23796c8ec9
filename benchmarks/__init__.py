"""Measurements. They run from a clone, and are not installed."""
