"""Number formats of parameters, activations and reductions."""
