"""From a module and example inputs to its layer graph."""

from placer.extras import extra

with extra("torch"):
    from placer.graph.capture import capture
    from placer.graph.layers import Layer, LayerGraph, Value

__all__ = ["Layer", "LayerGraph", "Value", "capture"]
