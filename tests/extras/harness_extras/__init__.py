"""Extends the harness: one of each kind of thing that a package can add."""
