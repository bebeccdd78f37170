"""Laying flat what torch.export nests: ``torch.no_grad()`` and ``torch.autocast`` become notes on
the nodes inside.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

REGIONS = "placer_regions"
"""Key in ``node.meta``: the regions around a node, outermost first: ``("grad", False)`` or ``("autocast", dtype,
...)``."""


def inline_regions(module: fx.GraphModule, regions: tuple[Any, ...] = ()) -> None:
    """Lay the nested regions of a graph flat, and note on every node which regions it stands in."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.op == "call_module" and node.target == "_guards_fn":
            graph.erase_node(node)
            continue
        region = _region(node)
        if region is None:
            node.meta.setdefault(REGIONS, regions)
            continue
        body_index = 1 if region[0] == "grad" else 4
        body = getattr(module, str(node.args[body_index].target))
        inline_regions(body, (*regions, region))
        _splice(module, node, body, node.args[body_index + 1 :])
    for node in reversed(list(graph.nodes)):
        if (
            node.op == "get_attr"
            and not node.users
            and isinstance(getattr(module, str(node.target), None), fx.GraphModule)
        ):
            graph.erase_node(node)


def _region(node: fx.Node) -> tuple[Any, ...] | None:
    if node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
        return ("grad", node.args[0])
    if getattr(node.target, "__name__", "") == "wrap_with_autocast":
        return ("autocast", *node.args[:4])
    return None


def _splice(
    module: fx.GraphModule, call: fx.Node, body: fx.GraphModule, arguments: Sequence[Any]
) -> None:
    """Put a copy of ``body``'s nodes where ``call`` stands, and what they name beside what the
    graph's nodes name.
    """
    graph = module.graph
    env: dict[fx.Node, Any] = {}
    places = iter(arguments)
    results: Sequence[Any] = ()
    with graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(places)
            elif node.op == "output":
                results = fx.map_arg(node.args[0], lambda inner: env[inner])
            else:
                env[node] = graph.node_copy(node, lambda inner: env[inner])
                if node.op == "get_attr":
                    env[node].target = f"{call.name}_{node.name}"
                    setattr(module, env[node].target, operator.attrgetter(str(node.target))(body))
    for user in list(call.users):
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(call)
