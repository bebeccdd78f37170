"""Which of the model's results each value leads to: what leads to none has no gradient, and none is
sent back for it.

Zeros in its place would have weight decay and momentum change weights that the unsplit model leaves
as they are, and 0 times infinity is no number.
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
        results: for each of them the model's results that a gradient may come from; empty without
            training.
    """

    results: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, graph: LayerGraph, operations: fx.Graph) -> Flows:
        """Those of a layer graph in training.

        Args:
            graph: the layers.
            operations: what they were made of: a value has the name of the operation that gives it.
        """
        found = _found(
            operations, {name for name in graph.outputs if graph.values[name].requires_grad}
        )
        differentiable = {name for name, value in graph.values.items() if value.requires_grad}
        return cls(
            {name: results for name, results in found.items() if results and name in differentiable}
        )

    def through(self, name: str) -> bool:
        """Whether a gradient flows back through that value."""
        return name in self.results

    def depend(self, names: Sequence[str]) -> bool:
        """Whether it depends on the loss through which of these values gradients come: not all lead
        to every result.
        """
        everything = frozenset[str]().union(*self.results.values())
        return any(self.results[name] != everything for name in names if self.through(name))


def _found(operations: fx.Graph, results: set[str]) -> dict[str, frozenset[str]]:
    """By operation, the results that it leads to: more, but none too few, where operations write in
    place.
    """
    nodes = list(operations.nodes)
    shared, homes = _storages(nodes)
    found: dict[fx.Node, set[str]] = {node: {node.name} & results for node in nodes}
    changed = True
    while changed:
        changed = False
        for node in reversed(nodes):
            ways = [user for user in node.users if _differentiable(user)]
            # What is written goes on in everything that has the same storage.
            ways += [
                other
                for target in written_arguments(node)
                for home in homes[target]
                for other in shared[home]
            ]
            more = set[str]().union(*(found[way] for way in ways)) - found[node]
            found[node] |= more
            changed = changed or bool(more)
    return {node.name: frozenset(found[node]) for node in nodes}


def _differentiable(node: fx.Node) -> bool:
    """Whether a gradient of the result may come back to what it was made of."""
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
    """The nodes that may share each storage, and the storages of each node; one of the state goes
    by its name.

    What is detached has a storage of its own: no gradient goes from one to the other.
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
