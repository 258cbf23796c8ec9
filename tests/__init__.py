"""Tests; a regular package, so that no installed package of this name comes before it."""
