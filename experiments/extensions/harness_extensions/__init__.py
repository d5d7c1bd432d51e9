"""Things that few jobs need, each found by an entry point."""
