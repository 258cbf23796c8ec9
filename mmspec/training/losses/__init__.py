"""Losses of drafters, a file each."""
