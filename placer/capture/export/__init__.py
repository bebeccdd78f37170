"""The capture by torch.export: one flat graph of ATen operators, and what it must be told."""
