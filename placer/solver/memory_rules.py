"""The memory of ``costs.py`` as constraints of the integer program, one function a rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from placer.schema import Layer
from placer.solver import costs
from placer.solver.problem import Problem

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

    from placer.solver.model import PlacementModel, Term


def memory(model: PlacementModel) -> None:
    """Every device stays within its limit, and, if memory is the objective, within the objective."""
    if not model.relaxed and model.objective != "memory" and (not model.limited or not can_bind(model.problem)):
        return
    fixed = [_fixed(model, device) for device in model.devices]
    if model.problem.training:
        _training(model, fixed)
    else:
        _inference(model, fixed)


def can_bind(problem: Problem) -> bool:
    """Whether some device could be over its limit: it cannot where all layers fit at once."""
    return use_of_all(problem) > min(device.usable_bytes for device in problem.devices)


def use_of_all(problem: Problem) -> int:
    """What a device with all layers would hold with all micro-batches in flight, in bytes."""
    everything = costs.Held(list(range(len(problem.layers))), list(problem.values))
    return costs.memory_use(problem, everything, problem.request.chunks).total_bytes


def byte_sizes(problem: Problem) -> list[int]:
    """Every size that the model adds up, as often as it may be added."""
    sizes = [state_bytes(problem, layer) for layer in problem.layers]
    sizes += [workspace_bytes(problem, layer) for layer in problem.layers]
    often = problem.request.chunks if problem.training else 1
    sizes += [layer.saved_bytes * often for layer in problem.layers if problem.training]
    sizes += [value.bytes * often for value in problem.values]
    return [size for size in sizes if size]


def state_bytes(problem: Problem, layer: Layer) -> int:
    """What the layer holds all the time."""
    held = layer.param_bytes + layer.buffer_bytes
    return held + layer.grad_bytes + layer.optimizer_bytes if problem.training else held


def workspace_bytes(problem: Problem, layer: Layer) -> int:
    """The most that the layer needs while it runs."""
    if problem.training:
        return max(layer.forward_workspace_bytes, layer.backward_workspace_bytes)
    return layer.forward_workspace_bytes


def _within(model: PlacementModel, device: int, use: Term, given: Sequence[cp_model.IntVar] = ()) -> None:
    """The use stays within the device's limit, at least where all of some literals hold."""
    limit = model.problem.devices[device].usable_bytes // model.byte_unit
    if model.relaxed:
        model.cp.add(use <= limit + model.makespan).only_enforce_if(*given)
        return
    if model.limited:
        model.cp.add(use <= limit).only_enforce_if(*given)
    if model.objective == "memory":
        model.cp.add(use <= model.makespan).only_enforce_if(*given)


def _fixed(model: PlacementModel, device: int) -> cp_model.IntVar:
    """Parameters, buffers and, in training, gradients and optimizer state of the layers on a device."""
    terms: list[Term] = []
    for node, layers in enumerate(model.nodes.nodes):
        size = sum(model.units(state_bytes(model.problem, model.problem.layers[layer])) for layer in layers)
        terms.append(size * model.on(node, device))
    return _named(model, terms, f"fixed{device}")


def _named(model: PlacementModel, terms: Sequence[Term], name: str) -> cp_model.IntVar:
    """A variable that is at least a sum."""
    variable = model.cp.new_int_var(0, 2**53, name)
    model.cp.add(variable >= sum(terms))
    return variable


# Training


def _training(model: PlacementModel, fixed: Sequence[Term]) -> None:
    for device in model.devices:
        saved = _saved(model, device)
        workspace = _workspace(model, device)
        for flight, given in _in_flight(model, device):
            _within(model, device, fixed[device] + flight * saved + workspace, given)


def _saved(model: PlacementModel, device: int) -> cp_model.IntVar:
    """What one micro-batch leaves on a device for its backward pass; a value counts once."""
    terms: list[Term] = []
    for node, layers in enumerate(model.nodes.nodes):
        size = sum(model.units(model.problem.layers[layer].saved_bytes) for layer in layers)
        terms.append(size * model.on(node, device))
    for value in model.problem.values:
        kept = model.any_on(model.nodes.of(value.keepers), device)
        if kept is not None:
            terms.append(model.units(value.bytes) * kept)
    return _named(model, terms, f"saved{device}")


def _workspace(model: PlacementModel, device: int) -> cp_model.IntVar:
    """The largest need of any layer on a device."""
    workspace = model.cp.new_int_var(0, 2**53, f"workspace{device}")
    for node, layers in enumerate(model.nodes.nodes):
        size = max(model.units(workspace_bytes(model.problem, model.problem.layers[layer])) for layer in layers)
        if size and device in model.x[node]:
            model.cp.add(workspace >= size).only_enforce_if(model.x[node][device])
    return workspace


def _in_flight(model: PlacementModel, device: int) -> Iterator[tuple[int, list[cp_model.IntVar]]]:
    """How many micro-batches a device holds, and the literals under which it does.

    Under 1F1B stage p of S holds S - p of them, but never more than there are: f of them if stage p + f - 1 is used.
    """
    chunks = model.problem.request.chunks
    if not model.problem.contiguous or model.problem.request.schedule == "fill-drain":
        yield chunks, []
        return
    for p in model.stages:
        if model.stage_is_device and p != device:
            continue
        for flight in range(1, min(chunks, len(model.stages) - p) + 1):
            here = [] if model.stage_is_device else [model.at[p][device]]
            yield flight, [*here, model.used[p + flight - 1]]


# Inference


def _inference(model: PlacementModel, fixed: Sequence[Term]) -> None:
    """At every step the values that are live on a device, and the workspace of the layer that runs there, fit."""
    problem, nodes = model.problem, model.nodes
    for device in model.devices:
        _within(model, device, fixed[device])
    for step, live_values in enumerate(_live_by_step(problem)):
        workspace = model.units(workspace_bytes(problem, problem.layers[step]))
        for device in model.devices:
            use: list[Term] = [fixed[device], workspace * model.on(nodes.node_of[step], device)]
            for value_index in live_values:
                value = problem.values[value_index]
                holders = [reader for reader in value.readers if reader >= step]
                live = model.any_on(nodes.of([*holders, step] if value.source == step else holders), device)
                if live is not None:
                    use.append(model.units(value.bytes) * live)
            if len(use) > 1:
                _within(model, device, sum(use))


def _live_by_step(problem: Problem) -> list[list[int]]:
    """By step, the values that are live somewhere."""
    live: list[list[int]] = [[] for _ in problem.layers]
    for index, value in enumerate(problem.values):
        for step in range(value.source, value.readers[-1] + 1):
            live[step].append(index)
    return live
