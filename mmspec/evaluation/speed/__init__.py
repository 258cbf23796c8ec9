"""Speed: time, forward passes of the target, and memory."""
