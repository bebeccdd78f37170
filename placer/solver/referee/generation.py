"""The referee's own reading of objective ``generation``: a mean pass, and what follows from it.

It shares nothing with the solver, and implements the formulas in the docstring of
``placer/solver/latency/generation.py`` a second time: with fractions, and by counting values.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from fractions import Fraction
from math import ceil, floor
from typing import Any

from placer.errors import PlacementError
from placer.schema import (
    Edge,
    Generation,
    GenerationOptions,
    Layer,
    Placement,
    PlacementRequest,
    Profile,
)
from placer.solver.referee.claims import close, equal, near
from placer.solver.referee.latency import latency_ms
from placer.solver.referee.loads import busiest_ms, times_of
from placer.solver.referee.memory import Memory

_Value = tuple[str, frozenset[str], int]
"""A value by its source, its readers, and its number among the values with equal ones."""


def _parts(request: PlacementRequest) -> tuple[Profile, Profile, GenerationOptions]:
    if request.token_profile is None or request.generation is None:
        raise PlacementError("objective 'generation' needs token_profile and generation")
    return request.profile, request.token_profile, request.generation


def mean_pass(request: PlacementRequest) -> PlacementRequest:
    """Return the request that asks for a mean pass in place of a generation."""
    prompt, token, asked = _parts(request)
    # Exact numbers: a rounding error would let ``ceil`` add a byte.
    share = Fraction(1, asked.new_tokens)
    sizes = _sizes(prompt), _sizes(token)
    values = dict.fromkeys([*sizes[0], *sizes[1]])
    edges, more = [], defaultdict[str, int](int)
    names = [layer.name for layer in prompt.layers]
    for value in values:
        first, later = (of_pass[value] for of_pass in sizes)
        sent = ceil(share * first + (1 - share) * later)
        source, readers, _ = value
        edges.append(Edge(source=source, targets=tuple(sorted(readers)), bytes=sent))
        last = max(map(names.index, readers))
        for name in names[names.index(source) : last + 1]:
            more[name] += max(first, later) - sent
    of_token = {layer.name: layer for layer in token.layers}
    layers = [
        layer.model_copy(
            update={
                "forward_ms": {
                    kind: float(share) * layer.forward_ms[kind]
                    + float(1 - share) * of_token[layer.name].forward_ms[kind]
                    for kind in {device.type for device in request.devices}
                },
                "expert_share": float(share * Fraction(layer.expert_share))
                + float((1 - share) * Fraction(of_token[layer.name].expert_share)),
                "buffer_bytes": layer.buffer_bytes + _cache(request, layer),
                "forward_workspace_bytes": more[layer.name]
                + max(each.forward_workspace_bytes for each in (layer, of_token[layer.name])),
            }
        )
        for layer in prompt.layers
    ]
    groups = [*prompt.colocated, *(one for one in token.colocated if one not in prompt.colocated)]
    changed: dict[str, Any] = {"layers": tuple(layers), "edges": tuple(edges)}
    return request.model_copy(
        update={
            "profile": prompt.model_copy(update={**changed, "colocated": tuple(groups)}),
            "objective": "throughput" if asked.sequences_in_flight > 1 else "latency",
            "token_profile": None,
            "generation": None,
            "explain": False,
            "cluster": request.placed_on,
        }
    )


def _sizes(profile: Profile) -> Counter[_Value]:
    """Return the bytes of each value."""
    seen: Counter[tuple[str, frozenset[str]]] = Counter()
    sizes: Counter[_Value] = Counter()
    for edge in profile.edges:
        key = edge.source, frozenset(edge.targets)
        sizes[*key, seen[key]] = edge.bytes
        seen[key] += 1
    return sizes


def _cache(request: PlacementRequest, layer: Layer) -> int:
    """Return the bytes of the cache of a layer, for all sequences in flight."""
    _, token, asked = _parts(request)
    (with_cache,) = (one.buffer_bytes for one in token.layers if one.name == layer.name)
    return asked.sequences_in_flight * (with_cache - layer.buffer_bytes)


def value_ms(request: PlacementRequest, asked: PlacementRequest, placement: Placement) -> float:
    """Return the time between the ends of two generations.

    Args:
        request: the question.
        asked: the request for a mean pass.
        placement: the answer.
    """
    _, _, options = _parts(request)
    where = placement.layer_devices
    if placement.resting:
        passes = [latency_ms(request, where, placement.resting)]
        passes += [_token_ms(request, placement)] * (options.new_tokens - 1)
        return sum(passes)
    alone = latency_ms(asked, where)
    if options.sequences_in_flight == 1:
        return options.new_tokens * alone
    every = alone / options.sequences_in_flight
    return options.new_tokens * max(busiest_ms(asked, where), every)


def claimed_for_mean_pass(
    request: PlacementRequest, asked: PlacementRequest, placement: Placement
) -> Placement:
    """Return what a placement claims about a mean pass.

    Its value is recomputed, and nothing is claimed about its bound: both are checked for the
    generation. The memory of the cache is part of the buffers of a mean pass.

    Args:
        request: the question.
        asked: the request for a mean pass.
        placement: the answer.
    """
    prompt, _, options = _parts(request)
    changed: dict[str, Any] = {
        "id": asked.content_hash(),
        "objective": asked.objective,
        "generation": None,
        "limits": None,
    }
    single = placement.single_device
    if single is not None:
        each = single.objective_value / options.new_tokens
        changed["single_device"] = single = single.model_copy(update={"objective_value": each})
    where = placement.layer_devices
    if where:
        is_latency = asked.objective == "latency"
        value = (
            latency_ms(asked, where, placement.resting) if is_latency else busiest_ms(asked, where)
        )
        changed |= {"objective_value": value, "bound": 0.0, "gap": 1.0 if value else 0.0}
        changed["status"] = "feasible" if value else "optimal"
        changed["speedup"] = single.objective_value / value if single and value else None
    devices = []
    for load in placement.devices:
        mine = [layer for layer in prompt.layers if where[layer.name] == load.device]
        size = sum(_cache(request, layer) for layer in mine)
        equal(f"cache_bytes of {load.device}", load.memory.cache_bytes, size)
        together = {"buffer_bytes": load.memory.buffer_bytes + size, "cache_bytes": 0}
        memory = load.memory.model_copy(update=together)
        devices.append(load.model_copy(update={"memory": memory}))
    return placement.model_copy(update={**changed, "devices": tuple(devices)})


def check_report(request: PlacementRequest, placement: Placement, value: float) -> None:
    """Raise PlacementError where the times of a generation are not what they should be.

    Args:
        request: the question.
        placement: the answer.
        value: its objective.
    """
    prompt, _, options = _parts(request)
    said, where = placement.generation, placement.layer_devices
    if said is None:
        raise PlacementError("a placement for generations comes with its times")
    equal("generation", {name: getattr(said, name) for name in dict(options)}, dict(options))
    near("first_token_ms", said.first_token_ms, latency_ms(request, where, placement.resting))
    equal("whether token_ms is given", said.token_ms is not None, options.new_tokens > 1)
    if said.token_ms is not None:
        near("token_ms", said.token_ms, _token_ms(request, placement))
    near("generation_ms", said.generation_ms, options.sequences_in_flight * value)
    tokens = options.new_tokens * prompt.batch_size
    if said.tokens_per_s is None or not close(said.tokens_per_s * value, 1000.0 * tokens):
        equal("tokens_per_s", said.tokens_per_s, 1000.0 * tokens / value if value else None)
    _check_copies(request, said)


def _token_ms(request: PlacementRequest, placement: Placement) -> float:
    """Return the time of a pass of one token alone."""
    _, token, _ = _parts(request)
    # the request's devices and links count
    changed = {"profile": token, "cluster": request.placed_on}
    later = request.model_copy(update=changed)
    return latency_ms(later, placement.layer_devices, placement.resting)


def _copies(request: PlacementRequest) -> tuple[dict[str, float], dict[str, int]]:
    """Return, by device, the milliseconds of a mean pass and the number of caches with room.

    A device holds the whole model, and at most as many caches as sequences are in flight.
    """
    prompt, _, options = _parts(request)
    asked, flight = mean_pass(request), options.sequences_in_flight
    one_cache = sum(_cache(request, layer) for layer in prompt.layers) // flight
    pass_ms: dict[str, float] = {}
    caches: dict[str, int] = {}
    for device in request.devices:
        where = {layer.name: device.name for layer in prompt.layers}
        others = Memory(asked, where, True).total(device.name, 1) - flight * one_cache
        free = Fraction(device.usable_bytes - others)
        caches[device.name] = min(flight, floor(free / one_cache)) if one_cache else flight
        if free < one_cache:
            caches[device.name] = 0
        pass_ms[device.name] = times_of(asked, where)[device.name].compute_ms
    return pass_ms, caches


def _check_copies(request: PlacementRequest, said: Generation) -> None:
    """Raise PlacementError unless the copies are on the quickest devices that have the memory."""
    prompt, _, options = _parts(request)
    flight, rules = options.sequences_in_flight, request.constraints
    pass_ms, caches = _copies(request)
    may = flight > 1 and not rules.pinned and not rules.forbidden
    fitting = [name for name in pass_ms if caches[name] and may]
    fitting.sort(key=pass_ms.__getitem__)
    most = min(flight, rules.max_devices or flight)
    true = fitting[:most]
    if len(true) < 2 or sum(caches[name] for name in true) < flight or not pass_ms[true[0]]:
        true = []
    equal("copies", said.copies, tuple(name for name in pass_ms if name in true))
    rate = sum(1000 * prompt.batch_size / pass_ms[name] for name in true) if true else None
    equal("whether copies_tokens_per_s is given", said.copies_tokens_per_s is None, rate is None)
    near("copies_tokens_per_s", said.copies_tokens_per_s or 0.0, rate or 0.0)
