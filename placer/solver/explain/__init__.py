"""Explanations of an answer: why no placement exists, what limits it and what would help."""
