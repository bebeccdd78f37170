"""The Python state that a model's code reads and writes while it is traced."""
