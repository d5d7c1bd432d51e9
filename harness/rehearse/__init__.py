"""Rehearsals: a job's real code on a GPU that is not there."""
