"""Decoding places of a block in any order: rules and sessions."""
