"""The alternatives on the same problem: each peer's placement under our cost model.

Peers that need a package count only where it can be imported: ``torchgpipe`` and ``accelerate``. A
placement that does not fit in memory, or is not allowed, counts as no answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from placer.solver import costs
from placer.solver.chain import optimal_cuts
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction, reduced

ONE_ORDER = "DP over one topological order"
TORCHGPIPE = "torchgpipe's block partition"
ACCELERATE = "accelerate's infer_auto_device_map"
PACKAGES = {TORCHGPIPE: "torchgpipe", ACCELERATE: "accelerate"}
MOST_LAYERS = 4096
"""Of more, peers are not asked: some take minutes."""


def missing() -> list[str]:
    """Return the packages of peers that are not installed."""
    return [package for package in PACKAGES.values() if find_spec(package) is None]


def values(problem: Problem) -> dict[str, float | None]:
    """Return, by peer, the objective of its placement.

    It is None if the peer found no placement, or a placement that is not allowed.
    """
    if len(problem.layers) > MOST_LAYERS:
        return {}
    cut = replace(problem, contiguous=True, groups=problem.groups if problem.contiguous else ())
    nodes = reduced(cut)
    one_order = optimal_cuts.best_cut(cut, nodes).devices
    found: dict[str, float | None] = {ONE_ORDER: _value(problem, _joined(problem, one_order))}
    for peer, blocks in ((TORCHGPIPE, _torchgpipe), (ACCELERATE, _accelerate)):
        if find_spec(PACKAGES[peer]) is not None:
            found[peer] = _value(problem, _joined(problem, _spread(nodes, blocks(problem, nodes))))
    return found


def _value(problem: Problem, devices: list[int] | None) -> float | None:
    if devices is None or not costs.allowed(problem, devices):
        return None
    result = costs.evaluate(problem, devices)
    return None if result is None or not costs.fits(problem, result) else result.objective_value


def _torchgpipe(problem: Problem, nodes: Reduction) -> list[int]:
    """Return blocks of nodes in topological order, one per device, by times on the first device.

    torchgpipe partitions a sequence, so the nodes of a graph come one after another, without their
    transfers.
    """
    times = [sum(problem.compute_ms(layer, 0) for layer in node) for node in nodes.nodes]
    places = _accelerators(problem)
    solve = import_module("torchgpipe.balance.blockpartition").solve
    blocks: Sequence[Sequence[float]] = solve(times, min(len(places), len(times)))
    return [device for device, block in zip(places, blocks, strict=False) for _ in block]


def _accelerate(problem: Problem, nodes: Reduction) -> list[int] | None:
    """Return the map for the balanced memory of ``device_map="auto"``.

    Each node is a stand-in module with as many parameters.
    """
    torch, accelerate = import_module("torch"), import_module("accelerate")
    sizes = [sum(problem.layers[layer].param_bytes for layer in node) for node in nodes.nodes]
    stand_ins = torch.nn.Sequential(*(torch.nn.Module() for _ in sizes))
    for stand_in, size in zip(stand_ins, sizes, strict=True):
        content = torch.empty(size, dtype=torch.uint8, device="meta")
        stand_in.state = torch.nn.Parameter(content, requires_grad=False)
    places = _accelerators(problem)
    room = {index: problem.devices[device].usable_bytes for index, device in enumerate(places)}
    balanced = import_module("accelerate.utils").get_balanced_memory(stand_ins, max_memory=room)
    where = accelerate.infer_auto_device_map(stand_ins, max_memory=balanced)
    found: list[Any] = [where.get("", where.get(str(node))) for node in range(len(sizes))]
    return (
        [places[number] for number in found]
        if all(isinstance(number, int) for number in found)
        else None
    )


def _accelerators(problem: Problem) -> list[int]:
    return [index for index in range(len(problem.devices)) if index not in problem.untaxed]


def _spread(nodes: Reduction, by_node: list[int] | None) -> list[int] | None:
    return None if by_node is None else nodes.spread(by_node)


def _joined(problem: Problem, devices: list[int] | None) -> list[int] | None:
    """Return the devices with nodes that must be together on their first node's device.

    Peers place a sequence and do not know groups.
    """
    if devices is None:
        return None
    joined = list(devices)
    for group in problem.groups:
        for layer in group:
            joined[layer] = devices[group[0]]
    return joined


def skipped() -> Iterator[str]:
    """Yield the peers that are left out, as lines of text."""
    for package in missing():
        yield f"{package} is not installed: its column is left out"
