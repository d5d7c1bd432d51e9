"""What an outside package could have added, registered by entry points alone: foreign files."""
