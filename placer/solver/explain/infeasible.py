"""Why there is no placement, in words: which layer does not fit where, and how many bytes lack."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from placer.schema import Infeasibility
from placer.solver import costs
from placer.solver.bounds import memory_bounds
from placer.solver.bounds.memory_bounds import least_of_all, least_of_nodes
from placer.solver.cpsat.model import PlacementModel
from placer.solver.cpsat.runner import Answer, Limits, Meter
from placer.solver.problem import Problem
from placer.solver.reduce import Reduction
from placer.utils.units import bytes_text, count_text

CONTRADICTION = (
    "the pins, forbidden devices, colocated layers, links, numbers and contiguity "
    "contradict each other"
)


def plain_reason(problem: Problem, nodes: Reduction) -> Infeasibility | None:
    """Return a reason that can be seen without a search, or None."""
    return (
        _no_device_left(problem, nodes)
        or _wrong_numbers(problem, nodes)
        or _too_large_alone(problem, nodes)
        or _too_large_together(problem)
    )


def _no_device_left(problem: Problem, nodes: Reduction) -> Infeasibility | None:
    """Return a node whose layers, each for itself or together, may be on no device."""
    for layer, devices in enumerate(problem.allowed):
        if not devices:
            name = problem.layers[layer].name
            pinned = problem.request.constraints.pinned.get(name)
            where = (
                f"pinned to {pinned!r}, which is forbidden for it"
                if pinned
                else "forbidden on every device"
            )
            return Infeasibility(
                reason=f"layer {name!r} is {where}",
                layers=(name,),
                devices=(pinned,) if pinned else (),
            )
    for node, layers in enumerate(nodes.nodes):
        if not nodes.allowed[node]:
            names = _names(problem, layers)
            ways = {
                problem.layers[layer].name: _device_names(problem, problem.allowed[layer])
                for layer in layers
            }
            bound = {
                name: devices
                for name, devices in ways.items()
                if len(devices) < len(problem.devices)
            }
            each = "; ".join(
                f"{name!r} only on {listed(devices)}" for name, devices in list(bound.items())[:6]
            )
            return Infeasibility(
                reason=f"layers {listed(names)} are {_why_together(problem, layers)}, "
                f"but share no device: {each}",
                layers=names,
                devices=tuple(sorted({device for devices in bound.values() for device in devices})),
            )
    return None


def _wrong_numbers(problem: Problem, nodes: Reduction) -> Infeasibility | None:
    """Return a reason if the required numbers of devices and layers per device cannot be met."""
    least, most = problem.least_devices, problem.most_layers
    if least > len(nodes.nodes):
        kept = "the colocated layers" + (
            ", kept together by contiguity," if problem.contiguous else ""
        )
        return Infeasibility(
            reason=f"min_devices = {least}: {kept} leave {len(nodes.nodes)} parts "
            "that can be on devices of their own"
        )
    if most is None:
        return None
    for layers in nodes.nodes:
        if len(layers) > most:
            names = _names(problem, layers)
            return Infeasibility(
                reason=f"max_layers = {most}: layers {listed(names)} must share a device, "
                f"{len(names)} in all",
                layers=names,
            )
    if most * problem.most_devices < len(problem.layers):
        return Infeasibility(
            reason=f"max_layers = {most}: no more than "
            f"{count_text(most * problem.most_devices, 'layer')} fit on "
            f"{count_text(problem.most_devices, 'device')}; there are {len(problem.layers)}"
        )
    return None


def _why_together(problem: Problem, layers: tuple[int, ...]) -> str:
    """Return why layers must share a device, in words."""
    if any(set(layers) <= set(group) for group in problem.groups):
        return "colocated"
    names, rules = set(_names(problem, layers)), problem.request.constraints
    pins = Counter(device for name, device in rules.pinned.items() if name in names)
    groups = (*problem.request.profile.colocated, *rules.colocated)
    causes = ["colocation"] * any(len(names.intersection(group)) > 1 for group in groups)
    causes += ["pins"] * (max(pins.values(), default=0) > 1)
    # Without a group or pins, layers share a device only if the graph of the model has a cycle.
    return f"kept together by {' and '.join([*causes, 'contiguity'])}"


def _too_large_alone(problem: Problem, nodes: Reduction) -> Infeasibility | None:
    """Return a node that no device which it may be on can hold."""
    if not memory_bounds.can_bind(problem):
        return None
    for node, need in enumerate(least_of_nodes(problem, nodes)):
        layers = nodes.nodes[node]
        short = {
            device: need - problem.devices[device].usable_bytes for device in nodes.allowed[node]
        }
        if min(short.values()) > 0:
            nearest = min(short, key=lambda device: (short[device], device))
            names, device = _names(problem, layers), problem.devices[nearest]
            subject = (
                f"layer {names[0]!r} needs"
                if len(names) == 1
                else f"layers {listed(names)}, kept together, need"
            )
            choice = (
                "the largest limit"
                if len(short) == len(problem.devices)
                else "the largest limit allowed for it"
            )
            return Infeasibility(
                reason=f"{subject} {bytes_text(need)}; {choice} is "
                f"{bytes_text(device.usable_bytes)} "
                f"({device.name}): {bytes_text(short[nearest])} short",
                layers=names,
                devices=_device_names(problem, short),
                missing_bytes=short[nearest],
            )
    return None


def _too_large_together(problem: Problem) -> Infeasibility | None:
    """Return the reason if state and saved activations exceed all limits together, else None."""
    need = least_of_all(problem)
    able = sorted(
        frozenset.union(*problem.allowed), key=lambda d: (-problem.devices[d].usable_bytes, d)
    )
    able = able[: problem.most_devices]
    there = sum(problem.devices[device].usable_bytes for device in able)
    if need <= there:
        return None
    devices = _device_names(problem, able)
    return Infeasibility(
        reason=f"the layers need at least {bytes_text(need)} in all; {listed(devices)} "
        f"may use {bytes_text(there)} "
        f"together: {bytes_text(need - there)} short",
        devices=devices,
        missing_bytes=need - there,
    )


@dataclass
class Searcher:
    """Runs the integer program within what time is left."""

    time_left_s: Callable[[], float]
    workers: int
    seed: int
    stop: threading.Event | None
    meter: Meter

    def __call__(self, model: PlacementModel) -> Answer:
        """Solve one model."""
        return model.solve(
            Limits(self.time_left_s(), self.workers, self.seed, self.stop, meter=self.meter)
        )


def searched_reason(problem: Problem, nodes: Reduction, search: Searcher) -> Infeasibility:
    """Return how near to its memory limits a placement can be, or that requirements contradict."""
    contradiction = Infeasibility(reason=CONTRADICTION)
    if not memory_bounds.can_bind(problem):
        return contradiction
    answer = search(PlacementModel(problem, nodes, relaxed=True))
    if answer.infeasible:
        return contradiction
    short = int(answer.bound)
    if answer.devices is None:
        least = (
            f": whatever the placement, some device is {bytes_text(short)} or more over its limit"
            if short
            else ""
        )
        return Infeasibility(
            reason=f"no placement keeps every device within its memory{least}", missing_bytes=short
        )
    return reason_of_closest(
        problem, answer.devices, short, "" if answer.complete else " that was found"
    )


def reason_of_closest(
    problem: Problem, devices: list[int], short: int = 0, found: str = ""
) -> Infeasibility:
    """Return by how much the placement closest to the memory limits exceeds them.

    Args:
        problem: the placement problem.
        devices: by layer, its device; over some limit, with all links.
        short: the least excess of every placement in bytes; 0 if it is this placement's.
        found: the beginning of the sentence.
    """
    result = costs.costs_of(problem, devices)  # all that is missing is memory
    excess = {
        device.name: use.total_bytes - device.usable_bytes
        for device, use in zip(problem.devices, result.memory, strict=True)
        if use.total_bytes > device.usable_bytes
    }
    worst = max(excess, key=lambda name: excess[name])
    return Infeasibility(
        reason=f"no placement keeps every device within its memory: "
        f"the closest{found} leaves {worst} "
        f"{bytes_text(excess[worst])} short",
        layers=tuple(
            problem.layers[i].name
            for i, d in enumerate(devices)
            if problem.devices[d].name == worst
        ),
        devices=tuple(excess),
        missing_bytes=short or excess[worst],
    )


def _names(problem: Problem, layers: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(problem.layers[layer].name for layer in layers)


def _device_names(problem: Problem, devices: object) -> tuple[str, ...]:
    assert isinstance(devices, (list, frozenset, dict))
    return tuple(problem.devices[device].name for device in sorted(devices))


def listed(names: tuple[str, ...]) -> str:
    """Return the first few names as a text, with the number of the others."""
    shown = ", ".join(repr(name) for name in names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
