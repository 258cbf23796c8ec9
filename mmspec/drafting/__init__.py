"""What drafters share: trees, windows, lengths, sessions of heads."""
