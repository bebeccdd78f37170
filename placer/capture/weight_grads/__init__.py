"""Weight gradients as passes of their own, apart from input gradients."""
