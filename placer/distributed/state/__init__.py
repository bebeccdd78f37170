"""Parameters, buffers and optimizer state of one process, and checkpoints of them."""
