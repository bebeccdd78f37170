"""Batch dimensions: where the samples of a batch are in inputs, values and outputs."""
