"""Small random graphs on alike devices and maybe one more, and their best contiguous placement by
enumeration."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

from placer.schema import Cluster, Constraints, Device, Edge, Layer, Link, PlacementRequest, Profile
from placer.solver import costs
from placer.solver.problem import Problem

TIMES = (0.0, 0.5, 1.0, 2.0, 3.0, 6.0)
BYTES = (0, 1, 2, 4, 8)


def drawn(seed):
    """4 to 6 layers on 3 devices behind links of 1 byte per ms; some unordered, some devices free
    of transfers."""
    random = Random(seed)
    names = [f"l{index}" for index in range(random.randint(4, 5))]
    training = random.random() < 0.5
    slow = random.choice((1.0, 3.0))
    layers = [
        Layer(
            name=name,
            forward_ms={"t": (time := random.choice(TIMES)), "cpu": slow * time},
            backward_ms={"t": 0.0, "cpu": 0.0} if training else {},
            param_bytes=random.choice((0, 0, 1, 3)),
        )
        for name in names
    ]
    edges = [
        Edge(
            source=source,
            targets=random.sample(
                names[index + 1 :], random.choice((1, 1, min(2, len(names) - index - 1)))
            ),
            bytes=random.choice(BYTES),
            gradient_bytes=random.choice(BYTES) if training else 0,
        )
        for index, source in enumerate(names[:-1])
        if random.random() < 0.85
    ]
    kind = random.choice(("t", "cpu"))
    limit = random.choice((4, 7, 1_000))
    devices = [
        Device(name=f"d{i}", type=kind if i == 2 else "t", memory_bytes=limit) for i in range(3)
    ]
    links = [
        Link(source=a.name, target=b.name, bandwidth_bytes_per_s=1e3)
        for a, b in itertools.permutations(devices, 2)
    ]
    profile = Profile(
        layers=layers, edges=edges, training=training, cluster=Cluster(devices=devices, links=links)
    )
    problem = Problem.from_request(
        PlacementRequest(
            profile=profile, constraints=Constraints(contiguous=True), schedule="fill-drain"
        )
    )
    weightless = random.random() < 0.7
    values = tuple(
        replace(value, ordered=random.random() < 0.8, weightless=weightless)
        for value in problem.values
    )
    gradients = any(value.gradient_bytes for value in values)
    untaxed = frozenset({2}) if kind == "cpu" and random.random() < 0.5 else frozenset()
    return replace(
        problem, values=values, multicast=not gradients and random.random() < 0.5, untaxed=untaxed
    )


def best_of(problem, nodes):
    """Return the smallest bottleneck of all assignments, or None if no assignment is feasible."""
    every = itertools.product(range(len(problem.devices)), repeat=len(nodes.nodes))
    return least_bottleneck(problem, (nodes.spread(list(choice)) for choice in every))


def busiest(times, devices, count):
    """Return how long the device with the most work computes."""
    busy = [0.0] * count
    for time, device in zip(times, devices, strict=True):
        busy[device] += time[device]
    return max(busy)


def least_bottleneck(problem, assignments=None):
    """The same, of given assignments of the layers, or of all."""
    assert problem.request.objective == "throughput"
    places = range(len(problem.devices))
    times = [
        [problem.compute_ms(layer, place) for place in places]
        for layer, _ in enumerate(problem.layers)
    ]
    best = None
    for devices in assignments or itertools.product(places, repeat=len(times)):
        if best is not None and busiest(times, devices, len(places)) >= best:
            continue  # with its transfers it takes longer
        result = costs.evaluate(problem, devices) if costs.allowed(problem, devices) else None
        if result is None or (best is not None and result.objective_value >= best):
            continue
        if costs.fits(problem, result):  # last: memory is dear to count
            best = result.objective_value
    return best
