"""Profiling of a graph on another machine, and of one model on several hosts."""
