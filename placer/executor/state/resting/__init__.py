"""Weights that rest on the host between passes, in memory or on the disk."""
