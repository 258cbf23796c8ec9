"""Masked language models: LLaDA, Dream, SDAR, LLaDA2."""
