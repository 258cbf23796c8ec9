"""Chameleon: Anole and Lumina-mGPT."""
