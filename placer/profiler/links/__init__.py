"""Measurements of devices and of the links between them."""
