"""Check that every layout computes the same as one process."""
