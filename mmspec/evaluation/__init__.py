"""Evaluation: identity with plain decoding, speed, and image quality."""
