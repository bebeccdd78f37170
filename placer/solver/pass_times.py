r"""The time of one pass through the model on a placement, from its start to the last finish.

**Latency**, in milliseconds. Each device runs its layers in the profile's order, one at a time. A
layer starts when its device is free and every value that it reads is there::

    start(l)  = max of finish(k) over the layers k < l on m(l), and of
                finish(s) + [m(s) != m(l)] * t(v, m(s), m(l)) over the values v that l reads, from s
    finish(l) = start(l) + forward(l)

Objective ``latency`` in inference: the last finish. In training the backward pass starts when the
last forward has finished, and is the mirror image: the layers in reverse order, backward times, and
for each value that has a gradient, from each reader r to the source s, the time g(v, m(r), m(s)).
The objective is the two added. Links are never waited for.

**Resting parameters** (``host_weights.py`` chooses them, in inference). The parameters of layers
r(0), r(1), ... of device d, in execution order, rest in the host's memory or on its disk. Each pass
copies them, one layer after another, into two buffers in turn, from the pass's beginning on. With
b(l) the bytes of the layer's parameters, and the rates ``from_host`` and ``from_disk`` of d::

    transfer(b)  = host latency + b / host bandwidth                            from the host
                   host latency + disk latency
                   + b / the smaller one of host and disk bandwidth             from its disk
    copy(l)      = transfer(b(l))
    copied(r(i)) = max(copied(r(i-1)), finish(r(i-2))) + copy(r(i))
    start(r(i))  = the start above, but not before copied(r(i))

In memory, d has two buffers in place of these parameters, each as large as the largest b(r(i)).

**Experts that rest.** Of b(l), e(l) bytes are experts of a mixture, of which the tokens of a pass
are expected to choose the part share(l). If the layers that rest have at least
``LEAST_EXPERT_BYTES`` of experts in all, only chosen ones are copied, once the router of their
layer has run. The link to d carries the copies one by one in this order: copy(r(0)), copy(r(1)),
chosen(r(0)), copy(r(2)), chosen(r(1)), and so on. With ``last`` the end of the copy before::

    copy(l)      = transfer(b(l) - e(l))
    chosen(l)    = transfer(share(l) e(l)), or 0 without experts
    copied(r(i)) = max(last, finish(r(i-2))) + copy(r(i))
    finish(r(i)) = max(start(r(i)), last) + chosen(r(i)) + forward(r(i))

A pass runs its layers before the router first, so ``finish`` is at most that much too late.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from placer.schedule.host_link import HostCopy, HostLink
from placer.schema.base import Tier, copies_chosen_experts
from placer.solver.problem import Problem

Assignment = Sequence[int]
"""By layer, the index of its device."""

Resting = Mapping[int, Tier]
"""By layer whose parameters rest, where they do."""

NOTHING_RESTS: Resting = MappingProxyType({})


def latency_ms(
    problem: Problem,
    assignment: Assignment,
    again: frozenset[int] = frozenset(),
    resting: Resting = NOTHING_RESTS,
) -> float:
    """Return the time of one micro-batch through the model, in training also backwards.

    Args:
        problem: the placement problem.
        assignment: by layer, its device.
        again: the devices that recompute.
        resting: where the parameters of layers rest; nowhere in training.
    """
    count = len(problem.layers)
    forwards, backwards = _delays(problem, assignment)
    copies = _copies(problem, assignment, resting)
    total = _makespan(range(count), assignment, problem.forward_ms, forwards, copies)
    # The loss is behind the last layer, so no backward pass begins before the forward pass ends.
    if problem.training:
        times = problem.backward_ms
        if again:
            times = tuple(
                tuple(
                    back + (problem.again_ms(layer, device) if device in again else 0.0)
                    for device, back in enumerate(backs)
                )
                for layer, backs in enumerate(problem.backward_ms)
            )
        total += _makespan(range(count - 1, -1, -1), assignment, times, backwards)
    return total


def _delays(
    problem: Problem, assignment: Assignment
) -> tuple[list[list[tuple[int, float]]], list[list[tuple[int, float]]]]:
    """Return, by layer, what it waits for: pairs of a layer and the time of a value from there.

    The first list is of the forward pass, the second one of gradients in the backward pass.
    """
    forwards: list[list[tuple[int, float]]] = [[] for _ in problem.layers]
    backwards: list[list[tuple[int, float]]] = [[] for _ in problem.layers]
    for value in problem.values:
        source = assignment[value.source]
        for reader in value.readers:
            target = assignment[reader]
            apart = source != target
            forwards[reader].append(
                (value.source, problem.send_ms(value, source, target) if apart else 0.0)
            )
            if value.gradient_bytes:
                backwards[value.source].append(
                    (reader, problem.gradient_ms(value, source, target) if apart else 0.0)
                )
    return forwards, backwards


def _copies(problem: Problem, assignment: Assignment, resting: Resting) -> dict[int, HostCopy]:
    """Return the times of the copies of each layer whose parameters rest."""
    is_chosen = _are_chosen(problem, resting)
    return {
        layer: _copy(problem, layer, assignment[layer], at, is_chosen)
        for layer, at in resting.items()
    }


def layer_ms(problem: Problem, assignment: Assignment, resting: Resting) -> list[float]:
    """Return by layer, in inference, the time to its finish since its device and inputs were ready.

    It has the forward pass, and what the layer waits for copies of its parameters.

    Args:
        problem: the placement problem.
        assignment: by layer, its device.
        resting: where the parameters of layers rest.
    """
    inputs, _ = _delays(problem, assignment)
    order, copies = range(len(problem.layers)), _copies(problem, assignment, resting)
    spans = _spans(order, assignment, problem.forward_ms, inputs, copies)
    return [end_ms - start_ms for start_ms, end_ms in spans]


def copying_ms(problem: Problem, layers: Sequence[int], device: int, resting: Resting) -> float:
    """Return the time of a pass's copies of layers of a device from where they rest.

    Args:
        problem: the placement problem.
        layers: of the device, whose parameters rest.
        device: their device.
        resting: where the parameters of all layers rest.
    """
    is_chosen = _are_chosen(problem, resting)
    return sum(sum(_copy(problem, one, device, resting[one], is_chosen)) for one in layers)


def _are_chosen(problem: Problem, resting: Resting) -> bool:
    """Return whether a pass copies the experts that its tokens choose, and no others."""
    return copies_chosen_experts(sum(problem.layers[layer].expert_bytes for layer in resting))


def _copy(problem: Problem, layer: int, device: int, tier: Tier, is_chosen: bool) -> HostCopy:
    """Return the times to copy a layer's parameters to a device from where they rest."""
    own = problem.layers[layer]
    expert_bytes = own.expert_bytes if is_chosen else 0
    chosen_ms = 0.0
    if expert_bytes:
        chosen_ms = _transfer_ms(problem, device, tier, own.expert_share * expert_bytes)
    ahead_ms = _transfer_ms(problem, device, tier, own.param_bytes - expert_bytes)
    return HostCopy(ahead_ms, chosen_ms)


def _transfer_ms(problem: Problem, device: int, tier: Tier, size_bytes: float) -> float:
    """Return the time in which bytes come to a device from where parameters rest."""
    place = problem.devices[device]
    # What the disk reads is on its way to the device while the disk reads on.
    rates = [place.from_host] if tier == "host" else [place.from_host, place.from_disk]
    known = [rate for rate in rates if rate is not None]
    assert len(known) == len(rates)  # nothing rests without them
    slowest = min(rate.bandwidth_bytes_per_s for rate in known)
    latency_s = sum(rate.latency_s for rate in known)
    return 1e3 * (latency_s + size_bytes / slowest)


def _makespan(
    order: Sequence[int],
    assignment: Assignment,
    time_ms: Sequence[Sequence[float]],
    inputs: Sequence[Sequence[tuple[int, float]]],
    copies: Mapping[int, HostCopy] = MappingProxyType({}),
) -> float:
    """Return the last finish; the arguments are as for ``_spans``."""
    return max(end_ms for _, end_ms in _spans(order, assignment, time_ms, inputs, copies))


def _spans(
    order: Sequence[int],
    assignment: Assignment,
    time_ms: Sequence[Sequence[float]],
    inputs: Sequence[Sequence[tuple[int, float]]],
    copies: Mapping[int, HostCopy] = MappingProxyType({}),
) -> list[tuple[float, float]]:
    """Return by layer when its device and its inputs are ready, and its finish.

    Args:
        order: the layers, as they run.
        assignment: by layer, its device.
        time_ms: by layer and device.
        inputs: by layer, pairs of a layer waited for and a delay.
        copies: of each layer whose parameters rest.
    """
    spans = [(0.0, 0.0)] * len(order)
    free: dict[int, float] = {}
    copied: defaultdict[int, list[HostCopy]] = defaultdict(list)
    for layer in order:
        if layer in copies:
            copied[assignment[layer]].append(copies[layer])
    links = {device: HostLink(own) for device, own in copied.items()}
    for layer in order:
        device = assignment[layer]
        start = max(
            [free.get(device, 0.0), *(spans[source][1] + delay for source, delay in inputs[layer])]
        )
        forward_ms = time_ms[layer][device]
        free[device] = (
            links[device].run(start, forward_ms) if layer in copies else start + forward_ms
        )
        spans[layer] = start, free[device]
    return spans
