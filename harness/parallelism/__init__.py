"""How a model is distributed over ranks: a file per kind of parallelism; ``parallelize.py`` applies them."""
