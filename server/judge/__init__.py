"""Evaluations, comparisons and timelines of maps, computed in worker processes."""
