"""Batch dimensions: where the samples of a batch lie in inputs, values and outputs."""
