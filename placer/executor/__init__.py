"""Applies a placement to the unmodified model and runs it."""
