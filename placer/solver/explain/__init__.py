"""Explanations of an answer: why there is none, what limits it and what would help."""
