"""Inference through the pipeline: streams of batches, and calls that come again."""
