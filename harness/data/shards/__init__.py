"""Write a folder in shards: here, or as tasks of a SLURM array. After a kill the work continues."""
