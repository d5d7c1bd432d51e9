"""Generate text with trained weights, on any layout that computes one position at a time."""
