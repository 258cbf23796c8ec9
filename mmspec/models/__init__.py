"""Loading and checking of checkpoints, readers of official weight files, and fast linear layers on a CPU."""
