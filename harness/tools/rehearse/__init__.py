"""Rehearsals: a job's real code on a virtual GPU."""
