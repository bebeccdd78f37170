"""What is said of an answer beside its numbers: why there is none, what limits it and what would
help.
"""
