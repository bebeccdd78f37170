"""Training through the pipeline: stages with forward and backward passes, and the optimizer."""
