"""This machine's devices: measured, registered elsewhere, and lent to profile a client's graph."""
