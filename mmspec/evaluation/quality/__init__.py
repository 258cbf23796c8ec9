"""Quality of images, and their distance to those of plain decoding."""
