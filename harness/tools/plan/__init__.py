"""Predict a job before it runs: legality, memory, traffic, time."""
