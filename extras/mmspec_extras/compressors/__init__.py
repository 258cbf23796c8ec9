"""Compressors of visual tokens, which the entry points `mmspec.compressors` name."""
