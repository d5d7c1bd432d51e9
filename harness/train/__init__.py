"""One rank: the engine (one optimizer step), the trainer (the loop), and what observes the loop."""
