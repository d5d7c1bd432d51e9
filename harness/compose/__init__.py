"""From a command line to a resolved, checked job. The only room that knows Hydra."""
