"""Checks of captures and of micro-batches against the unsplit model."""
