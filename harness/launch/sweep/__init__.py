"""Sweeps: many jobs from one command, with their states and a results table. Imports no torch."""
