"""Configs, layers, sessions and published layouts that trained drafting heads share."""
