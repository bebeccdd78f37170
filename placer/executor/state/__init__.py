"""The state of a model over devices: where it is, what it was, and copies of it."""
