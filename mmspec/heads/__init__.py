"""Configs, layers, sessions and layouts that trained drafting heads share."""
