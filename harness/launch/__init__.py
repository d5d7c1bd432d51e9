"""Start ranks, here or on SLURM, run sweeps, and find the state of a run."""
