"""Number formats of the products of linears and experts: float8 and mxfp8, by torchao."""
