"""Tests and measurements on a GPU, in independent parts: `python -m benchmarks.gpu`."""
