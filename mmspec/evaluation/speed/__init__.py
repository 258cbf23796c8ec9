"""Time, forwards and memory."""
