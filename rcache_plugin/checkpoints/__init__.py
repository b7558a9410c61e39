"""Checkpoints: made, evicted, found by their tokens, rolled back to. Knows cells only."""
