"""Configurations that the harness finds beside those of its own conf/."""
