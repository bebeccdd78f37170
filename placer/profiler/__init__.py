"""Measurements of layers, memory, devices and links."""
