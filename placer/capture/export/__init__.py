"""Capture by torch.export, and the environment that it needs."""
