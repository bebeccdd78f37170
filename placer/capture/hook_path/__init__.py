"""The path for models that cannot be captured: forward hooks move tensors to their devices."""
