"""Places of a block that are decided where they stand."""
