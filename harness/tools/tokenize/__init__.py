"""Tokenize a source once, for any number of jobs: ``harness tokenize``."""
