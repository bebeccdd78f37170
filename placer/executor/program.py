"""The captures of one model: one for each mode and each shape that an earlier one does not cover, made when needed."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from placer.errors import CaptureError
from placer.executor import autocast
from placer.graph.capture import layer_graph
from placer.graph.export import Exported, export, modes, refuse_hooks
from placer.graph.granularity import Granularity
from placer.graph.layers import LayerGraph
from placer.graph.structure import Structure


@dataclass(eq=False)
class Capture:
    """One capture and the layer graphs that were cut from it, by granularity."""

    exported: Exported
    graphs: dict[Hashable, LayerGraph] = field(default_factory=dict)


@dataclass
class Program:
    """What is known of a model's graph so far.

    Attributes:
        module: the user's model.
        refused: why torch.export refused it, by mode; those modes run through hooks.
    """

    module: nn.Module
    refused: dict[Hashable, str] = field(default_factory=dict)
    _captures: dict[Hashable, list[Capture]] = field(default_factory=dict)
    _seen: dict[Hashable, Capture] = field(default_factory=dict)
    _members: list[object] = field(default_factory=list)

    def mode(self) -> Hashable:
        """What the graph depends on beside shapes: which modules train, which have hooks, and the caller's autocast."""
        return autocast.state(), *modes(self.module)

    def capture(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Any], inputs: Structure
    ) -> Capture | None:
        """A capture that covers these inputs, or None where the model must run through hooks."""
        self._follow()
        mode = self.mode()
        shapes = tuple((tensor.shape, tensor.dtype) if isinstance(tensor, Tensor) else tensor for tensor in tensors)
        key = (mode, inputs.key, shapes)
        if key not in self._seen:
            known = self._captures.setdefault((mode, inputs.key), [])
            fitting = next((capture for capture in known if capture.exported.covers(tensors)), None)
            if fitting is None:
                if mode in self.refused:
                    return None
                try:
                    refuse_hooks(self.module)
                    fitting = Capture(export(self.module, args, kwargs))
                except CaptureError as error:
                    self.refused[mode] = str(error)
                    return None
                known.append(fitting)
            self._seen[key] = fitting
        return self._seen[key]

    def _follow(self) -> None:
        """Forget the captures of a model that was given another module, parameter or buffer in the place of one."""
        now = members(self.module)
        if len(now) != len(self._members) or not all(map(operator.is_, now, self._members)):
            self._captures.clear()
            self._seen.clear()
            self._members = now

    def doubt_refusal(self) -> None:
        """The model itself failed on what was given: that torch.export failed on it too says nothing of the mode."""
        self.refused.pop(self.mode(), None)

    def graph(self, capture: Capture, granularity: Granularity) -> LayerGraph:
        """The capture, cut into layers; which values gradients flow through depends on what is frozen now."""
        frozen = tuple(parameter.requires_grad for parameter in self.module.parameters())
        key: Hashable = (granularity if isinstance(granularity, Hashable) else tuple(granularity), frozen)
        if key not in capture.graphs:
            capture.graphs[key] = layer_graph(capture.exported, self.module, granularity)
        return capture.graphs[key]


def members(module: nn.Module) -> list[object]:
    """A model's modules, parameters and buffers, the same objects as long as none was replaced.

    Every call of a flow asks for it, so it costs as little as can be: what is used twice is listed twice.
    """
    found: list[object] = []
    waiting = [module]
    while waiting:
        child = waiting.pop()
        found.append(child)
        found += child._parameters.values()
        found += child._buffers.values()
        waiting += [inner for inner in child._modules.values() if inner is not None]
    return found
