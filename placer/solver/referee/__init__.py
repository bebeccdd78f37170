"""The readings of an independent referee (``check.py``): nothing here is shared with the solver."""
