"""Use trained weights without training: load a checkpoint on a layout, for generation and evaluation."""
