"""The loss of micro-batches: weights, label counts, and verification against the whole batch."""
