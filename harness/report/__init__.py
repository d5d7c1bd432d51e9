"""Rows of runs become tables, laid beside published and predicted ones."""
