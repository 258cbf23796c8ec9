"""Relaxed acceptance: what rules share."""
