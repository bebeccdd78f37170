"""The memory model of ``memory.py`` as constraints over nodes and devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ortools.sat.python import cp_model

from placer.solver.bounds.memory_bounds import can_bind, state_bytes
from placer.solver.cpsat.peak_constraints import PeakConstraints
from placer.solver.cpsat.variables import PlacementVariables, Term
from placer.solver.problem import Problem

TERMS_A_RULE = 20
"""Terms of a sum that take as long to build as a rule."""


def rules_a_device(problem: Problem) -> int:
    """Return about how many rules the memory of a device takes: for steps and readers.

    In inference, the values in sums count too.
    """
    if problem.request.objective != "memory" and not can_bind(problem):
        return 0
    held = [value for value in problem.values if value.held_bytes]
    readers = sum(len(value.readers) for value in held)
    if problem.training:
        return len(problem.layers) + 2 * readers  # forwards and backwards
    terms = sum(value.readers[-1] - value.source + 1 for value in held)
    return len(problem.layers) + readers + terms // TERMS_A_RULE


def memory(model: PlacementVariables) -> None:
    """Require every device to stay within its limit, and within the objective if that is memory."""
    # Rules are needed only if memory can be exceeded or is the objective.
    if (
        not model.relaxed
        and model.objective != "memory"
        and (not model.limited or not can_bind(model.problem))
    ):
        return
    moments = PeakConstraints(model.problem, model.nodes, model.byte_unit)
    for device in model.placed:
        fixed, limit = _fixed(model, device), model.problem.devices[device].usable_bytes
        write = _training if model.problem.training else _inference
        write(model, moments, device, fixed, 0 if model.objective == "memory" else limit)


def _within(
    model: PlacementVariables, device: int, use: Term, given: Sequence[cp_model.IntVar] = ()
) -> None:
    """Require the use to stay within the device's limit, at least where all given literals hold."""
    limit = model.problem.devices[device].usable_bytes // model.byte_unit
    if model.relaxed:
        # The relaxed program minimises the largest excess over a limit, in the objective variable.
        model.cp.add(use <= limit + model.makespan).only_enforce_if(*given)
        return
    if model.limited:
        model.cp.add(use <= limit).only_enforce_if(*given)
    if model.objective == "memory":
        model.cp.add(use <= model.makespan).only_enforce_if(*given)


def _fixed(model: PlacementVariables, device: int) -> cp_model.IntVar:
    """Return the state of the layers on a device, and of its copies of shared parameters."""
    terms: list[Term] = []
    most = 0
    for node, layers in enumerate(model.nodes.nodes):
        size = sum(
            model.units(state_bytes(model.problem, model.problem.layers[layer])) for layer in layers
        )
        terms.append(size * model.on(node, device))
        most += size
    for number, shared in enumerate(model.problem.shared):
        size = model.units(shared.total_bytes)
        first = model.nodes.node_of[shared.first]
        copied = model.cp.new_bool_var(f"copied{number},{device}")
        # A device with one of the other layers, but without the first one, holds a copy.
        for node in model.nodes.holding(shared.others) - {first}:
            model.cp.add(copied >= model.on(node, device) - model.on(first, device))
        terms.append(size * copied)
        most += size
    fixed = model.cp.new_int_var(0, most, f"fixed{device}")
    model.cp.add(fixed >= sum(terms))
    return fixed


# Training


class _OnDevice:
    """A device, as the rules of its moments see it."""

    def __init__(self, model: PlacementVariables, device: int) -> None:
        self.cp, self._model, self._device = model.cp, model, device

    def here(self, node: int) -> cp_model.IntVar | None:
        """Return a literal that holds if the node is there; None if it cannot be."""
        return self._model.x[node].get(self._device)

    def share(self, node: int) -> Term:
        """1 if the node is there, else 0."""
        return self._model.on(node, self._device)


def _training(
    model: PlacementVariables, moments: PeakConstraints, device: int, fixed: Term, limit_bytes: int
) -> None:
    """Require the state, what further micro-batches keep, and the peak of one to fit.

    Where passes are recorded, their own memory counts instead.
    """
    place = _OnDevice(model, device)
    if model.problem.recorded and model.problem.recompute[device] == "never":
        each, landing, shared = moments.recorded(place, limit_bytes)
        for flight, given in _in_flight(model, device):
            _within(
                model,
                device,
                fixed + flight * (each + (landing if flight > 1 else 0)) + shared,
                given,
            )
        return
    kept, moment = moments.of_training(place, limit_bytes)
    for flight, given in _in_flight(model, device):
        _within(model, device, fixed + (flight - 1) * kept + moment, given)


def _in_flight(
    model: PlacementVariables, device: int
) -> Iterator[tuple[int, list[cp_model.IntVar]]]:
    """Return how many micro-batches a device holds, and the literals under which it does.

    Under 1F1B stage p of S holds S - p of them, but never more than there are: f of them if stage p
    + f - 1 is used. Under zero-bubble it holds as many at the least. Where the device may
    recompute, one: what it keeps of others is left to the evaluation of what is found.
    """
    chunks, schedule = model.problem.request.chunks, model.problem.request.schedule
    if model.problem.recompute[device] != "never":
        yield 1, []
        return
    if not model.problem.one_stage_each or schedule == "fill-drain":
        yield chunks, []
        return
    for p in model.stages:
        if model.stage_is_device and p != device:
            continue
        #     stage      p    p+1   p+2   ...  S-1
        #     in flight  S-p  ...               1      used[p + f - 1] means S - p >= f
        for flight in range(1, min(chunks, len(model.stages) - p) + 1):
            here = [] if model.stage_is_device else [model.at[p][device]]
            yield flight, [*here, model.used[p + flight - 1]]


# Inference


def _inference(
    model: PlacementVariables, moments: PeakConstraints, device: int, fixed: Term, limit_bytes: int
) -> None:
    """Require the live values and the running layer's workspace to fit at every step."""
    _within(model, device, fixed)
    for use in moments.of_inference(_OnDevice(model, device), limit_bytes):
        _within(model, device, fixed + use)
