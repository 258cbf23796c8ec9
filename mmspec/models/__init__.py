"""Architectures that transformers and diffusers lack, with converters of their official checkpoints."""
