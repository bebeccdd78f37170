"""Requests that many tests of the solver start from."""

import itertools

import pytest
from small_graphs import best_of, drawn

from placer.schema import Cluster, Constraints, Device, Edge, Layer, Link, PlacementRequest, Profile
from placer.solver.problem import Problem
from placer.solver.reduce import reduced


@pytest.fixture(scope="session")
def training_problem():
    """``training_problem(random)``.

    A problem whose values are read by several layers, some of which keep them.
    """
    return make_training_problem


APART = ("deferred_bytes", "input_grad_workspace_bytes", "weight_grad_workspace_bytes")
"""What counts where weight passes run apart."""


def make_training_problem(random, objective="memory", schedule="fill-drain"):
    """4 to 7 layers on 2 or 3 alike devices, drawn in a fraction of a millisecond."""
    sizes = (0, 0, 1, 2, 3, 5, 8)
    names = [f"l{i}" for i in range(random.randint(4, 7))]
    layers = [
        Layer(
            name=name,
            forward_ms={"t": 1},
            backward_ms={"t": 1},
            param_bytes=random.choice(sizes),
            grad_bytes=random.choice(sizes),
            saved_bytes=random.choice(sizes),
            forward_workspace_bytes=random.choice(sizes),
            backward_workspace_bytes=random.choice(sizes),
            recorded_workspace_bytes=random.choice(sizes),
            **{field: random.choice(sizes) for field in APART if schedule == "zero-bubble"},
        )
        for name in names
    ]
    edges = []
    for index, source in enumerate(names[:-1]):
        later = names[index + 1 :]
        targets = random.sample(later, random.randint(1, min(3, len(later))))
        saved_by = [name for name in (source, *targets) if random.random() < 0.3]
        size, gradient = random.choice(sizes), random.choice(sizes)
        rest = {}
        if len(targets) > 1 and random.random() < 0.7:
            *_, before, last = sorted(map(names.index, targets))
            until = random.choice(["", *names[before + 1 : last + 1]])
            rest = {"retained_bytes": random.choice(sizes), "retained_until": until}
        crossing = {"bytes": size, "gradient_bytes": gradient, "deferred": random.random() < 0.4}
        edges.append(Edge(source=source, targets=targets, saved_by=saved_by, **crossing, **rest))
    devices = [
        Device(name=f"d{i}", type="t", memory_bytes=10_000) for i in range(random.randint(2, 3))
    ]
    links = [
        Link(source=a.name, target=b.name, bandwidth_bytes_per_s=1e3)
        for a, b in itertools.permutations(devices, 2)
    ]
    cluster, share = Cluster(devices=devices, links=links), random.choice((0, 0, 1, 6))
    profile = Profile(
        layers=layers, edges=edges, training=True, cluster=cluster, optimizer_workspace_ratio=share
    )
    return Problem.from_request(
        PlacementRequest(
            profile=profile,
            objective=objective,
            chunks=random.choice((1, 3)),
            schedule=schedule,
            constraints=Constraints(contiguous=objective == "throughput"),
        )
    )


@pytest.fixture
def chain():
    """``chain(times, devices=2, ...)``.

    A request for layers in a row, one value between each two.
    """
    return make_chain


def make_chain(times_ms, devices=2, memory_bytes=1_000, param_bytes=0, value_bytes=0, **asked):
    """Return layers l0, l1, ... on alike devices d0, d1, ... with links of 1 byte per ms."""
    count = len(times_ms)
    params = param_bytes if isinstance(param_bytes, (list, tuple)) else [param_bytes] * count
    layers = [
        Layer(name=f"l{i}", forward_ms={"t": time}, param_bytes=size)
        for i, (time, size) in enumerate(zip(times_ms, params, strict=True))
    ]
    edges = [
        Edge(source=f"l{i}", targets=[f"l{i + 1}"], bytes=value_bytes) for i in range(count - 1)
    ]
    names = [f"d{i}" for i in range(devices)]
    cluster = Cluster(
        devices=[Device(name=name, type="t", memory_bytes=memory_bytes) for name in names],
        links=[
            Link(source=a, target=b, bandwidth_bytes_per_s=1e3)
            for a, b in itertools.permutations(names, 2)
        ],
    )
    return PlacementRequest(profile=Profile(layers=layers, edges=edges, cluster=cluster), **asked)


@pytest.fixture(scope="session")
def enumerated():
    """Return problems with their nodes and the smallest bottleneck of all assignments.

    Only problems with a bottleneck above 0 count.
    """
    problems = [drawn(seed) for seed in range(80)]
    found = [
        (problem, nodes, best_of(problem, nodes))
        for problem in problems
        for nodes in [reduced(problem)]
    ]
    return [each for each in found if each[2]]
