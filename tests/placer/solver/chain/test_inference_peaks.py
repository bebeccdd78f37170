"""Tables of the memory of intervals in inference, against each interval by itself."""

from itertools import pairwise
from random import Random

import pytest

from placer.schema import Cluster, Device, Edge, Layer, PlacementRequest, Profile
from placer.solver.chain.interval_peaks import inference_moments
from placer.solver.problem import Problem

SIZES = (0, 0, 1, 2, 3, 5, 8, 2**50 + 1)
"""Sums of the last are no longer exact as floats."""


def drawn(random):
    """2 to 9 layers, some of which make several values."""
    names = [f"l{index}" for index in range(random.randint(2, 9))]
    layers = [
        Layer(name=name, forward_ms={"t": 1}, forward_workspace_bytes=random.choice(SIZES))
        for name in names
    ]
    edges = []
    for index, source in enumerate(names[:-1]):
        later = names[index + 1 :]
        for _ in range(random.choice((0, 1, 1, 2))):
            targets = random.sample(later, random.randint(1, min(4, len(later))))
            edges.append(Edge(source=source, targets=targets, bytes=random.choice(SIZES)))
    cluster = Cluster(devices=[Device(name="d", type="t", memory_bytes=2**50)])
    return Problem.from_request(
        PlacementRequest(profile=Profile(layers=layers, edges=edges, cluster=cluster))
    )


def worst_moment(problem, here):
    """Return the most that is held at a step by a device with these layers."""

    def is_live(value, step):
        waiting = {reader for reader in value.readers if reader >= step}
        return value.source <= step and bool(waiting if value.source in here else waiting & here)

    return max(
        sum(value.bytes for value in problem.values if is_live(value, step))
        + (layer.forward_workspace_bytes if step in here else 0)
        for step, layer in enumerate(problem.layers)
    )


def differing(problem, blocks):
    """Return the intervals of blocks whose worst moment is not what the table has."""
    table = inference_moments(problem, blocks)
    spans = [
        (first, end) for first in range(len(blocks)) for end in range(first + 1, len(blocks) + 1)
    ]
    held = {span: {layer for block in blocks[slice(*span)] for layer in block} for span in spans}
    return [
        span for span, layers in held.items() if table[span] != float(worst_moment(problem, layers))
    ]


@pytest.mark.parametrize("shuffled", [False, True], ids=["the profile's order", "any order"])
@pytest.mark.parametrize("seed", range(5))
def test_each_interval_holds_what_a_device_with_its_layers_does(seed, shuffled):
    random = Random(seed)
    for _ in range(60):
        problem = drawn(random)
        count = len(problem.layers)
        order = random.sample(range(count), count) if shuffled else range(count)
        ends = sorted({0, count, *random.sample(range(count), random.randint(1, count))})
        assert not differing(problem, [list(order[first:end]) for first, end in pairwise(ends)])


def test_an_interval_that_holds_nothing_needs_nothing():
    problem = drawn(Random(0))
    table = inference_moments(problem, [[layer] for layer in range(len(problem.layers))])
    assert not any(table[first, end] for first in range(len(table)) for end in range(first + 1))
