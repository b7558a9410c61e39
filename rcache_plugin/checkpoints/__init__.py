"""Which states are kept, found again and rolled back to. Knows cells only."""
