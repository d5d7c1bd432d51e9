"""Save, load and list checkpoints."""
