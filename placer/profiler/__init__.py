"""Measures layers, memory, devices and links."""
