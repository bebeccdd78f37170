"""Gradients of a whole batch: accumulation, clipping, the optimizers and their memory."""
