"""Evaluation: identity, speed, and how often a reference model is right."""
