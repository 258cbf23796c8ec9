"""What trained drafting heads share."""
