"""Save, load and list checkpoints. One is complete or absent, and is read by any layout."""
