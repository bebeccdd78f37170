"""Lower bounds of objectives and of memory that need no search."""
