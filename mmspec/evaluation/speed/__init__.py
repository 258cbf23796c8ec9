"""Speed: time, target forwards and memory."""
