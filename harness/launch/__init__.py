"""Start runs and sweeps, here or on SLURM, and tell their states."""
