"""Is the output that of plain decoding, or of its distribution?"""
