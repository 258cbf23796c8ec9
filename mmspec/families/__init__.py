"""Model families, a folder each."""
