"""Capture: from a module and example inputs to its layer graph."""

from placer.utils.extras import extra

with extra("torch"):
    from placer.capture.capture import capture_graph
    from placer.capture.layers import Layer, LayerGraph, Value

__all__ = ["Layer", "LayerGraph", "Value", "capture_graph"]
