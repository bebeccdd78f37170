"""Effects of operations in addition to their result: random numbers and writes in place.

torch's schemas and tags declare most of them. Batch norm and dropout do not, so their rules are
here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from placer.capture.export import nested_ops

_DROPOUTS = {
    f"aten::{kind}dropout{end}"
    for kind in ("", "alpha_", "feature_", "feature_alpha_")
    for end in ("", "_")
}
"""Operations that return their input unchanged if they drop nothing."""


def has_effect(node: fx.Node) -> bool:
    """Return whether a node must stay in the graph even without users.

    It writes in place, draws random numbers, or is a border of the graph.
    """
    if (
        node.op in ("placeholder", "output")
        or nested_ops.is_transform(node)
        or updates_running_statistics(node)
    ):
        return True
    return isinstance(node.target, torch._ops.OpOverload) and (
        node.target._schema.is_mutable or node_draws_random(node)
    )


def updates_running_statistics(node: fx.Node) -> bool:
    """Return whether a normalisation changes running statistics, undeclared in its schema."""
    name = getattr(node.target, "_schema", None)
    return (
        name is not None
        and name.name in ("aten::batch_norm", "aten::instance_norm")
        # Argument 5 is ``training`` or ``use_input_stats``.
        and node.args[5] is True
    )


def node_draws_random(node: fx.Node) -> bool:
    """Return whether a node, or a graph of its own, draws from the device's generator.

    Dropout in evaluation mode does not.
    """
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        module = node.graph.owning_module
        bodies = (
            [nested_ops.nested_graph(module, source) for source in node.all_input_nodes]
            if module is not None
            else []
        )
        return any(
            node_draws_random(inner)
            for found in bodies
            if found is not None
            for inner in found.graph.nodes
        )
    return operation_draws_random(node.target, node.args, node.kwargs)


def operation_draws_random(operation: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation with these arguments draws random numbers.

    Attention and recurrent networks have a dropout argument and draw only if it is positive.

    Args:
        operation: an overload of torch.ops; anything else draws nothing.
        args: positional arguments.
        kwargs: keyword arguments.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(operation, "tags", ()):
        return False
    schema = operation._schema
    given = {argument.name: argument.default_value for argument in schema.arguments}
    given |= {**dict(zip(given, args, strict=False)), **kwargs}
    trains = given.get("train") is not False and given.get("training") is not False
    name = "p" if schema.name in _DROPOUTS else "dropout" if "dropout" in given else "dropout_p"
    return trains and given.get(name) != 0
