"""File formats of other projects: tokens, and weights."""
