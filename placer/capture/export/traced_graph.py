"""Checks and changes of a graph as torch.export makes it: tied tensors, sizes, generators."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from placer import devices
from placer.capture.grouping import storage_roots, written_arguments
from placer.capture.python_state.plain_tensors import plain_names
from placer.errors import CaptureError

PREFIX = "module."
"""Start of the targets in the graph: the user's model is an attribute of the exported module."""


def refuse_shared_inputs(tensors: Sequence[Any], written_to: set[int]) -> None:
    """Raise a CaptureError if forward writes to an input that shares memory with another input.

    In the graph, the two inputs are separate copies.
    """
    places = [_memory_id(tensor) for tensor in tensors]
    if any(places.count(places[place]) > 1 for place in written_to if places[place] is not None):
        raise CaptureError(
            "forward writes to an input that shares memory with another input; in a graph the "
            "other input would not change"
        )


def merge_tied_nodes(graph_module: fx.GraphModule, module: nn.Module) -> set[int]:
    """Give a tensor that the model knows by several names one node.

    So a write by one name is visible under every name.

    Returns:
        The identities of the tensors that the graph writes to.

    Raises:
        CaptureError: forward writes to a tensor that shares memory with another tensor. On another
            device, each has a copy of its own, and the other would not see the write.
    """
    first: dict[int, fx.Node] = {}
    sharing: dict[int, set[fx.Node]] = {}
    values: dict[fx.Node, Tensor] = {}
    graph = graph_module.graph
    for node in list(graph.nodes):
        value = operator.attrgetter(node.target)(graph_module) if node.op == "get_attr" else None
        if not isinstance(value, Tensor):
            continue
        values[node] = value
        if first.setdefault(id(value), node) is not node:
            node.replace_all_uses_with(first[id(value)])
            graph.erase_node(node)
        elif (memory := _memory_id(value)) is not None:
            sharing.setdefault(memory, set()).add(node)
    operations = [node for node in graph.nodes if node.op == "call_function"]
    roots = storage_roots(operations)
    changed = {
        root
        for node in operations
        for target in written_arguments(node)
        for root in roots.get(target, {target})
    }
    # One tensor has one node by now. Nodes that still share memory are different tensors, and on
    # another device each has a copy of its own.
    for nodes in sharing.values():
        if len(nodes) > 1 and not changed.isdisjoint(nodes):
            plain = plain_names(module)
            names = sorted(
                plain.get(id(values[node]), str(node.target).removeprefix(PREFIX)) for node in nodes
            )
            raise CaptureError(
                f"forward writes to memory that {', '.join(map(repr, names))} share; on other "
                "devices these have separate copies, of which one would change"
            )
    return {id(values[node]) for node in changed if node in values}


def _memory_id(tensor: Any) -> int | None:
    """Return an identifier of a tensor's memory; None for a sparse tensor or a non-tensor."""
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        return None
    return int(devices.unwrapped(tensor).untyped_storage()._cdata)


def refuse_shapes_from_values(graph: fx.Graph) -> None:
    """Raise a CaptureError if the size of a result depends on values of tensors.

    Its memory could not be planned.
    """
    for node in graph.nodes:
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, Tensor) else ():
            if isinstance(size, torch.SymInt) and not size.node.has_hint():
                raise CaptureError(
                    f"the shape of the result of {node.target} depends on values of tensors"
                )


def refuse_generators(module: fx.GraphModule) -> None:
    """Raise a CaptureError if the model draws from its own torch.Generator.

    A graph would not seed it.
    """
    for node in module.graph.nodes:
        if node.op == "get_attr" and isinstance(
            operator.attrgetter(node.target)(module), torch.Generator
        ):
            raise CaptureError(
                "forward draws from its own torch.Generator, which a graph would not seed"
            )


def views_to_reshapes(graph: fx.Graph) -> None:
    """Turn views into reshapes.

    On another device, an operation may return other strides than in the capture, and a view would
    fail. With the same strides, a reshape is a view.
    """
    for node in graph.nodes:
        if node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
            node.target = torch.ops.aten.reshape.default
