"""Compressors of visual tokens, registered under the entry point group `mmspec.compressors`."""
