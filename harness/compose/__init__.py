"""From a command line to a resolved, checked job: Hydra, and the rules between groups."""
