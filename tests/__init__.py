"""Tests. This is a regular package, so that it takes precedence over installed packages of this name."""
