"""Readers of checkpoints as the authors of heads publish them, and writers of their layouts."""
