"""Visual tokens of a prompt: where they stand, and how fewer are put in their place."""
