"""What an outside package could have added, registered by entry points alone: Flux, foreign files."""
