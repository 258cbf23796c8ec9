"""Visual tokens of a prompt: their places, and their replacement by fewer tokens."""
