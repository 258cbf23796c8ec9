"""The reference models: the world they see, their training, their scoring. Nothing that users need."""
