"""Estimates of a model's memory without devices and without weights, on fake tensors."""
