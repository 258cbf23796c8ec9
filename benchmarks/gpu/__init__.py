"""Everything to run on a machine with a GPU, in parts that fail alone: `python -m benchmarks.gpu`."""
