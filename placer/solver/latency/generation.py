r"""Objective ``generation``: one prompt's pass and many passes of one token, as a mean pass.

A generation of n new tokens is a pass over the prompt, which gives the first token, and n - 1
passes of one token. Its time on a placement is n times the time of a *mean pass*::

    forward(l)  = (prompt's forward(l) + (n - 1) * token's forward(l)) / n
    bytes(v)    = (prompt's bytes(v) + (n - 1) * token's bytes(v)) / n, rounded up; a value that one
                  pass lacks has 0 bytes there
    share(l)    = (prompt's share(l) + (n - 1) * token's share(l)) / n, of experts that are chosen

So a link's latency counts once for each value and pass. Memory must suffice for either pass. Of
layer l, with K sequences in flight::

    cache(l)     = K * (token's buffers(l) - prompt's buffers(l))
    buffers(l)   = prompt's buffers(l) + cache(l)
    workspace(l) = max(prompt's forward_workspace(l), token's forward_workspace(l))
                   + sum of max(prompt's bytes(v), token's bytes(v)) - bytes(v) over the values v
                   that are made at l or before, and read at l or after

The objective, in ms, is the time between the ends of two generations in a steady state. With one
sequence in flight, that is the time of a generation::

    latency    = last finish of a mean pass; bottleneck = largest load by a mean pass
    generation = n * latency                                K = 1; where parameters rest on the
                                                            host, the passes' latencies added up
               = n * max(bottleneck, latency / K)           K > 1: K passes at a time, at most

The objectives ``latency`` and ``throughput`` of the mean pass are therefore all that is solved::

    K = 1                ──▶ latency
    K >= devices         ──▶ throughput: with transfers "added", the latency is at most the sum of
                             the loads, hence at most K times the bottleneck
    otherwise            ──▶ throughput, throughput on K devices, and latency; the best one counts.
                             No placement is better than the bound of the throughput, or than the
                             bound of the latency divided by K

With K > 1, the alternative to one placement is a copy of the whole model on each of several
devices. Device d has memory for the model and M(d) caches, and takes T(d) for a mean pass alone.
Of the devices with M(d) > 0, the copies are on the K quickest ones, or on all if there are fewer.
They are reported if there are two or more with room for K caches in all::

    tokens per second of copies = sum of batch_size / T(d) over the devices with a copy
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from time import monotonic
from types import MappingProxyType
from typing import Any, NamedTuple

from placer.schema import (
    DeviceLoad,
    Edge,
    Generation,
    GenerationOptions,
    Layer,
    Placement,
    PlacementRequest,
    Profile,
    SingleDevice,
)
from placer.schema.base import Tier
from placer.solver import answer, costs, pass_times
from placer.solver.latency.host_weights import WeightedPass
from placer.solver.problem import Problem
from placer.solver.search import Incumbent, Progress

Solve = Callable[[PlacementRequest, Progress | None], Placement]


class Passes(NamedTuple):
    """The profiles of both passes, and what is generated.

    Attributes:
        prompt: the prompt's pass.
        token: a pass of one token.
        asked: the prompt, the new tokens and the sequences in flight.
    """

    prompt: Profile
    token: Profile
    asked: GenerationOptions

    def mean(self, prompt: float, token: float) -> float:
        """Return the mean over the passes of a generation."""
        count = self.asked.new_tokens
        return (prompt + (count - 1) * token) / count

    def mean_bytes(self, prompt: int, token: int) -> int:
        """Return the mean over the passes of a generation, rounded up."""
        count = self.asked.new_tokens
        return -(-(prompt + (count - 1) * token) // count)


def passes_of(request: PlacementRequest) -> Passes:
    """Return the passes of a request with objective ``generation``."""
    assert request.token_profile is not None and request.generation is not None  # as validated
    return Passes(request.profile, request.token_profile, request.generation)


def mean_pass_request(request: PlacementRequest) -> PlacementRequest:
    """Return the request for a mean pass: the shortest latency, or bottleneck if several run.

    Args:
        request: with objective ``generation``.
    """
    passes = passes_of(request)
    is_alone = passes.asked.sequences_in_flight == 1
    return request.model_copy(
        update={
            "objective": "latency" if is_alone else "throughput",
            "profile": mean_pass(passes),
            "token_profile": None,
            "generation": None,
            "cluster": request.placed_on,
        }
    )


def mean_pass(passes: Passes) -> Profile:
    """Return the profile of a mean pass, with the memory of all sequences in flight."""
    token_layers = {layer.name: layer for layer in passes.token.layers}
    edges, more_bytes = _edges(passes)
    layers = tuple(
        _layer(passes, layer, token_layers[layer.name], more)
        for layer, more in zip(passes.prompt.layers, more_bytes, strict=True)
    )
    groups = dict.fromkeys((*passes.prompt.colocated, *passes.token.colocated))
    return passes.prompt.model_copy(
        update={"layers": layers, "edges": edges, "colocated": tuple(groups)}
    )


def _layer(passes: Passes, prompt: Layer, token: Layer, more_bytes: int) -> Layer:
    forward_ms = {
        kind: passes.mean(time_ms, token.forward_ms[kind])
        for kind, time_ms in prompt.forward_ms.items()
        if kind in token.forward_ms
    }
    workspace = max(prompt.forward_workspace_bytes, token.forward_workspace_bytes)
    return prompt.model_copy(
        update={
            "forward_ms": forward_ms,
            "expert_share": passes.mean(prompt.expert_share, token.expert_share),
            "buffer_bytes": prompt.buffer_bytes + _cache_bytes(passes, prompt, token),
            "forward_workspace_bytes": workspace + more_bytes,
        }
    )


def _cache_bytes(passes: Passes, prompt: Layer, token: Layer) -> int:
    return passes.asked.sequences_in_flight * (token.buffer_bytes - prompt.buffer_bytes)


def cache_bytes(request: PlacementRequest) -> dict[str, int]:
    """Return the bytes of keys and values by layer, of all sequences in flight.

    Args:
        request: with objective ``generation``.
    """
    passes = passes_of(request)
    token_layers = {layer.name: layer for layer in passes.token.layers}
    return {
        layer.name: _cache_bytes(passes, layer, token_layers[layer.name])
        for layer in passes.prompt.layers
    }


def _edges(passes: Passes) -> tuple[tuple[Edge, ...], list[int]]:
    """Return the values of a mean pass, and by layer the bytes that either pass holds beyond."""
    place = {layer.name: index for index, layer in enumerate(passes.prompt.layers)}
    edges, more = [], [0] * len(place)
    for (source, targets), prompt, token in _paired(passes):
        sent = passes.mean_bytes(prompt, token)
        edges.append(Edge(source=source, targets=targets, bytes=sent))
        # The mean is less than the larger of the two passes holds, and memory must suffice for
        # both: count the rest at every layer at which the value waits.
        for step in range(place[source], max(place[target] for target in targets) + 1):
            more[step] += max(prompt, token) - sent
    return tuple(edges), more


def _paired(passes: Passes) -> Iterator[tuple[tuple[str, tuple[str, ...]], int, int]]:
    """Yield source and readers of each value, with its bytes in both passes."""
    sizes: dict[tuple[str, tuple[str, ...]], tuple[list[int], list[int]]] = {}
    for number, profile in enumerate((passes.prompt, passes.token)):
        for edge in profile.edges:
            # A profile does not name values, so the values of both passes are paired by source and
            # readers, and several between the same layers by their order.
            key = edge.source, tuple(sorted(set(edge.targets)))
            sizes.setdefault(key, ([], []))[number].append(edge.bytes)
    for key, (prompt, token) in sizes.items():
        for one, other in zip_longest(prompt, token, fillvalue=0):
            yield key, one, other


def solved(request: PlacementRequest, solve: Solve, progress: Progress | None) -> Placement:
    """Return the best placement for a generation.

    Args:
        request: with objective ``generation``.
        solve: answers a request with another objective.
        progress: called with each better placement, where one search decides; or None.
    """
    asked = mean_pass_request(request).model_copy(update={"explain": False})
    flight = passes_of(request).asked.sequences_in_flight
    most = min(asked.constraints.max_devices or len(asked.devices), len(asked.devices))
    if flight == 1 or flight >= most:
        found = solve(asked, None if progress is None else _of_generations(request, progress))
        return answered(request, found, found.bound)
    return _best_of_three(request, asked, flight, solve)


def _of_generations(request: PlacementRequest, progress: Progress) -> Progress:
    """Return a function that reports placements of a mean pass as placements of a generation."""
    count = passes_of(request).asked.new_tokens

    def report_one(found: Incumbent) -> None:
        def placement() -> Placement:
            return answered(request, found.placement(), found.bound)

        times = {"objective_value": count * found.objective_value, "bound": count * found.bound}
        progress(replace(found, **times, placement=placement))

    return report_one


def _best_of_three(
    request: PlacementRequest, asked: PlacementRequest, flight: int, solve: Solve
) -> Placement:
    """Return the best of the shortest bottlenecks, on few and on all devices, and latency."""
    began, rules = monotonic(), asked.constraints
    few = rules.model_copy(update={"max_devices": max(flight, rules.min_devices or 1)})
    questions: list[dict[str, Any]] = [{}, {"constraints": few}, {"objective": "latency"}]
    answers = []
    for number, changed in enumerate(questions):
        # equal parts of the time that is left
        left_s = (asked.time_limit_s - (monotonic() - began)) / (len(questions) - number)
        limit = {"time_limit_s": max(left_s, 0.01 * asked.time_limit_s)}
        answers.append(solve(asked.model_copy(update={**changed, **limit}), None))
    steady, _, quick = answers
    # The second question's bound holds on few devices only, and proves nothing for the request.
    bound = max(steady.bound or 0.0, (quick.bound or 0.0) / flight)
    found = [answered(request, one, bound) for one in answers if one.layer_devices]
    if not found:
        # the requirements of the last question are the request's own
        return answered(request, quick, bound)
    best = min(found, key=lambda one: one.objective_value or 0.0)
    return best.model_copy(update={"solve_time_s": sum(one.solve_time_s for one in answers)})


def answered(request: PlacementRequest, found: Placement, bound_ms: float | None) -> Placement:
    """Return the placement of a generation, from a placement of its mean pass.

    Args:
        request: with objective ``generation``.
        found: the placement; possibly none.
        bound_ms: a lower bound of the objective for each pass; None without one.
    """
    passes = passes_of(request)
    count = passes.asked.new_tokens
    header = {"id": request.content_hash(), "objective": "generation"}
    single = of_all(request, found.single_device)
    if not found.layer_devices:
        bound = None if found.status == "infeasible" or bound_ms is None else bound_ms * count
        changed = {**header, "bound": bound, "single_device": single}
        return found.model_copy(update=changed)
    value = generation_ms(request, found.layer_devices, found.resting)
    return found.model_copy(
        update={
            **header,
            **answer.proof(value, (bound_ms or 0.0) * count),
            "objective_value": value,
            "single_device": single,
            "speedup": single.objective_value / value if single is not None and value else None,
            "devices": with_cache(request, found.layer_devices, found.devices),
            "generation": report(request, found, value),
        }
    )


def of_all(request: PlacementRequest, single: SingleDevice | None) -> SingleDevice | None:
    """Return what one device takes for a generation; the latency of one device is its load.

    Args:
        request: with objective ``generation``.
        single: what the device takes for a mean pass; None without it.
    """
    if single is None:
        return None
    count = passes_of(request).asked.new_tokens
    return single.model_copy(update={"objective_value": single.objective_value * count})


def generation_ms(
    request: PlacementRequest,
    where: Mapping[str, str],
    resting: Mapping[str, Tier] = MappingProxyType({}),
) -> float:
    """Return the objective of a map, in ms.

    Args:
        request: with objective ``generation``.
        where: the device of each layer.
        resting: where the parameters of layers rest.
    """
    passes = passes_of(request)
    asked = passes.asked
    # With copies, the latency is not linear in the layers' times: a layer starts at the later of
    # its copy and its inputs. The mean pass would give another time.
    if resting:
        first_ms = _pass_ms(request, passes.prompt, where, resting)
        later = asked.new_tokens - 1
        return first_ms + (later and later * _pass_ms(request, passes.token, where, resting))
    problem = Problem.from_request(mean_pass_request(request))
    assignment = problem.assignment_of(where)
    latency_ms = pass_times.latency_ms(problem, assignment)
    if asked.sequences_in_flight == 1:
        return asked.new_tokens * latency_ms
    loads = zip(*costs.loads(problem, assignment), strict=True)
    join = max if request.transfers == "overlapped" else sum
    bottleneck_ms = max(join(parts) for parts in loads)
    return asked.new_tokens * max(bottleneck_ms, latency_ms / asked.sequences_in_flight)


def copies(request: PlacementRequest) -> tuple[tuple[str, ...], float | None]:
    """Return the devices of copies of the whole model, and their new tokens per second.

    Without copies, there are no devices, and the second item is None.

    Args:
        request: with objective ``generation``.
    """
    passes, rules = passes_of(request), request.constraints
    flight = passes.asked.sequences_in_flight
    # A copy has every layer on its device, which such rules may not allow.
    if flight == 1 or rules.pinned or rules.forbidden:
        return (), None
    problem = Problem.from_request(mean_pass_request(request))
    sequence_bytes = sum(cache_bytes(request).values()) // flight
    fitting: list[tuple[float, int, int]] = []
    for index, device in enumerate(problem.devices):
        alone = costs.evaluate(problem, [index] * len(problem.layers))
        assert alone is not None  # nothing crosses
        # The device's memory alone includes the caches of all sequences in flight. Add them again
        # to know what is free for caches.
        free_bytes = device.usable_bytes - alone.memory[index].total_bytes + flight * sequence_bytes
        # without a cache, any number of sequences fits if one does
        has_room_for_all = free_bytes >= flight * sequence_bytes
        most = flight if has_room_for_all else free_bytes // max(1, sequence_bytes)
        if most > 0:
            fitting.append((alone.compute_ms[index], index, most))
    chosen = sorted(fitting)[: min(flight, rules.max_devices or flight)]
    if len(chosen) < 2 or sum(most for _, _, most in chosen) < flight or chosen[0][0] == 0:
        return (), None
    rate = sum(1000 * passes.prompt.batch_size / pass_ms for pass_ms, _, _ in chosen)
    places = sorted(index for _, index, _ in chosen)
    return tuple(problem.devices[index].name for index in places), rate


def report(request: PlacementRequest, found: Placement, value_ms: float) -> Generation:
    """Return the times of a generation on a map.

    Args:
        request: with objective ``generation``.
        found: the device of each layer, and where parameters rest.
        value_ms: the objective of the map.
    """
    where, resting = found.layer_devices, found.resting
    passes = passes_of(request)
    asked = passes.asked
    tokens = asked.new_tokens * passes.prompt.batch_size
    devices, rate = copies(request)
    return Generation(
        **asked.model_dump(),
        first_token_ms=_pass_ms(request, passes.prompt, where, resting),
        token_ms=_pass_ms(request, passes.token, where, resting) if asked.new_tokens > 1 else None,
        generation_ms=asked.sequences_in_flight * value_ms,
        tokens_per_s=1000 * tokens / value_ms if value_ms else None,
        copies=devices,
        copies_tokens_per_s=rate,
    )


def _pass_ms(
    request: PlacementRequest,
    profile: Profile,
    where: Mapping[str, str],
    resting: Mapping[str, Tier],
) -> float:
    """Return the time of one pass alone on a map."""
    problem = Problem.from_request(_pass_request(request, profile))
    return pass_times.latency_ms(
        problem, problem.assignment_of(where), resting=problem.by_number(resting)
    )


def _pass_request(request: PlacementRequest, profile: Profile) -> PlacementRequest:
    """Return the request for one pass alone."""
    changed: dict[str, Any] = {"objective": "latency", "profile": profile}
    return mean_pass_request(request).model_copy(update=changed)


def weighted_passes(request: PlacementRequest) -> list[WeightedPass]:
    """Return the request for each pass of a generation alone, with its share of all passes.

    Args:
        request: with objective ``generation``.
    """
    passes = passes_of(request)
    count = passes.asked.new_tokens
    shares = (1 / count, passes.prompt), ((count - 1) / count, passes.token)
    return [(share, _pass_request(request, profile)) for share, profile in shares if share]


def with_cache(
    request: PlacementRequest, where: Mapping[str, str], loads: Sequence[DeviceLoad]
) -> tuple[DeviceLoad, ...]:
    """Return the loads of a mean pass with the cache apart from other buffers.

    Args:
        request: with objective ``generation``.
        where: the device of each layer.
        loads: of each device.
    """
    cached: dict[str, int] = {}
    for layer, size in cache_bytes(request).items():
        cached[where[layer]] = cached.get(where[layer], 0) + size
    found = []
    for load in loads:
        size = cached.get(load.device, 0)
        apart = {"buffer_bytes": load.memory.buffer_bytes - size, "cache_bytes": size}
        memory = load.memory.model_copy(update=apart)
        found.append(load.model_copy(update={"memory": memory}))
    return tuple(found)
