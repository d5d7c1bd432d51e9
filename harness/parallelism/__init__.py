"""How a model is distributed over ranks: a file for each kind of parallelism, applied in one order."""
