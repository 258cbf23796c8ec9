"""Shared parts of drafters: trees, windows, lengths, sessions of heads."""
