"""Visual tokens of a prompt: their places, and the replacement of them by fewer."""
