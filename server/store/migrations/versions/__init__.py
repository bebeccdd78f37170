"""One file a step; once released, a step never changes."""
