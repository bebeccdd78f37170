"""The model outputs that each value influences; without any, no gradient is sent back for it.

Zeros instead of no gradient would let weight decay and momentum change weights that the unsplit
model leaves unchanged, and 0 times infinity is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from placer.capture.export.inlining import REGIONS
from placer.capture.grouping import storage_roots, written_arguments
from placer.capture.layers import LayerGraph
from placer.capture.pytrees import SYMBOLIC_NUMBERS

_DETACH = (torch.ops.aten.detach, torch.ops.aten.detach_)


@dataclass(frozen=True)
class Flows:
    """The values that gradients flow back through.

    Attributes:
        results: for each of them, the model outputs that it influences; empty without training.
    """

    results: Mapping[str, frozenset[str]]

    @classmethod
    def from_graph(cls, graph: LayerGraph, operations: fx.Graph) -> Flows:
        """Return the values of a layer graph that gradients flow through in training.

        Args:
            graph: the layers.
            operations: the operations of the layers; a value has the name of its operation.
        """
        found = _found(
            operations, {name for name in graph.outputs if graph.values[name].requires_grad}
        )
        differentiable = {name for name, value in graph.values.items() if value.requires_grad}
        return cls(
            {name: results for name, results in found.items() if results and name in differentiable}
        )

    def through(self, name: str) -> bool:
        """Return whether a gradient flows back through a value."""
        return name in self.results

    def depend(self, names: Sequence[str]) -> bool:
        """Return whether the loss determines which of these values receive gradients.

        This is the case if some of them do not influence all outputs.
        """
        everything = frozenset[str]().union(*self.results.values())
        return any(self.results[name] != everything for name in names if self.through(name))


def _found(operations: fx.Graph, results: set[str]) -> dict[str, frozenset[str]]:
    """Return for each operation the outputs that it influences.

    In-place operations make this an over-approximation.
    """
    nodes = list(operations.nodes)
    shared, homes = _storages(nodes)
    found: dict[fx.Node, set[str]] = {node: {node.name} & results for node in nodes}
    changed = True
    # a fixed point: in-place writes create cycles, so one reverse sweep is not enough
    while changed:
        changed = False
        for node in reversed(nodes):
            readers = [user for user in node.users if _differentiable(user)]
            # a write influences everything that shares the storage
            readers += [
                other
                for target in written_arguments(node)
                for home in homes[target]
                for other in shared[home]
            ]
            more = set[str]().union(*(found[reader] for reader in readers)) - found[node]
            found[node] |= more
            changed = changed or bool(more)
    return {node.name: frozenset(found[node]) for node in nodes}


def _differentiable(node: fx.Node) -> bool:
    """Return whether a gradient of the result can flow back to the operands."""
    example = node.meta.get("val")
    return (
        node.op == "call_function"
        and not isinstance(example, SYMBOLIC_NUMBERS)
        and (not isinstance(example, Tensor) or example.is_floating_point() or example.is_complex())
        and ("grad", False) not in node.meta.get(REGIONS, ())
        and getattr(node.target, "overloadpacket", None) not in _DETACH
    )


def _storages(
    nodes: Sequence[fx.Node],
) -> tuple[dict[Any, list[fx.Node]], dict[fx.Node, list[Any]]]:
    """Return the nodes of each storage, and the storages of each node.

    State is identified by its name. A detached result counts as a storage of its own, because no
    gradient connects the two.
    """
    roots = storage_roots([node for node in nodes if _differentiable(node)])
    shared: dict[Any, list[fx.Node]] = {}
    homes: dict[fx.Node, list[Any]] = {}
    for node in nodes:
        homes[node] = [
            root.target if root.op == "get_attr" else root for root in roots.get(node, {node})
        ]
        for home in homes[node]:
            shared.setdefault(home, []).append(node)
    return shared, homes
