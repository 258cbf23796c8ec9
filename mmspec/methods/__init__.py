"""Decoding methods, one folder each; `mmspec.plugins` finds them."""
