"""Janus and Janus-Pro."""
