"""XLNet, an any-subset density model."""
