"""Enumeration of all maps of a small problem."""
