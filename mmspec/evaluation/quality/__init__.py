"""Quality of images, and its distance to plain decoding."""
