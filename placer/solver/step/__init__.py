"""Objective ``step``: micro-batches, schedule and map together, for the shortest whole batch."""
