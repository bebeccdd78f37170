"""Evaluations, comparisons and timelines of maps, in processes of their own."""
