"""The training loop on one rank."""
