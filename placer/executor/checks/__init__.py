"""Comparisons of captures and of micro-batches with the unsplit model."""
