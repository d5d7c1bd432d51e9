"""Optimizers, their settings for each tensor, and the schedule of the learning rate."""
