"""Sweeps: many jobs from one command, what has become of each, and the table of them. Imports no torch."""
