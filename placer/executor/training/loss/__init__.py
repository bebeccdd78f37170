"""The loss of micro-batches: weights of each, label counts, and the check against the whole batch."""
