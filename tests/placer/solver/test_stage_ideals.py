"""Ideals of random graphs, against all sets of layers."""

import itertools
from random import Random

import numpy as np
import pytest
from rows import row

from placer.schema import Edge
from placer.solver.problem import Problem
from placer.solver.replicas import stage_ideals as ideals
from placer.solver.replicas.stage_ideals import stage_ideals


def request_of(arcs, times, size_bytes=8):
    """A question with these values between layers that take so long."""
    request = row(times, chunks=2)
    names = [layer.name for layer in request.profile.layers]
    edges = tuple(
        Edge(
            source=names[source],
            targets=tuple(names[reader] for reader in sorted(readers)),
            bytes=size_bytes,
        )
        for source, readers in arcs.items()
    )
    profile = request.profile.model_copy(update={"edges": edges})
    constraints = request.constraints.model_copy(update={"contiguous": True})
    return request.model_copy(update={"profile": profile, "constraints": constraints})


def drawn(seed, count):
    random = Random(seed)
    return {
        source: readers
        for source in range(count - 1)
        if (readers := {one for one in range(source + 1, count) if random.random() < 0.4})
    }


def closed_sets(arcs, count):
    """All sets of layers that contain what their layers read."""
    pairs = [(source, reader) for source, readers in arcs.items() for reader in readers]
    return {
        frozenset(held)
        for size in range(count + 1)
        for held in map(set, itertools.combinations(range(count), size))
        if all(source in held for source, reader in pairs if reader in held)
    }


def found_sets(found):
    return {frozenset(np.flatnonzero(row).tolist()) for row in found.members}


@pytest.mark.parametrize("seed", range(12))
def test_all_sets_that_stages_can_begin_with_are_found(seed):
    arcs = drawn(seed, 7)
    found = stage_ideals(Problem.from_request(request_of(arcs, [1.0] * 7)))
    assert found.is_complete and found_sets(found) == closed_sets(arcs, 7)
    assert found.members.sum(axis=1).tolist() == sorted(found.members.sum(axis=1))


@pytest.mark.parametrize("most", [6, 40])
def test_some_are_chosen_of_too_many(monkeypatch, most):
    monkeypatch.setattr(ideals, "MOST_IDEALS", 5)
    monkeypatch.setattr(ideals, "MOST_FOUND", most)
    arcs = {0: {1, 2, 3, 4}, 1: {5}, 2: {5}, 3: {5}, 4: {5}}  # 2 + 2 ** 4 + 1 sets
    found = stage_ideals(Problem.from_request(request_of(arcs, [1.0] * 6)))
    assert not found.is_complete and len(found.members) <= 5
    assert found_sets(found) <= closed_sets(arcs, 6)
    assert not found.members[0].any() and found.members[-1].all()


def test_layers_without_costs_add_no_ideals():
    # 0 and 1 have no inputs and values without bytes; nobody reads 4
    arcs = {0: {3, 5}, 1: {2}, 2: {3, 4}, 3: {5}}
    request = request_of(arcs, [0.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    empty = [
        edge.model_copy(update={"bytes": 0}) if edge.source in {"l0", "l1"} else edge
        for edge in request.profile.edges
    ]
    profile = request.profile.model_copy(update={"edges": tuple(empty)})
    found = stage_ideals(Problem.from_request(request.model_copy(update={"profile": profile})))
    assert found.is_complete
    assert found_sets(found) == {
        frozenset(),
        *map(frozenset, ({0, 1, 2, 4}, {0, 1, 2, 3, 4}, {0, 1, 2, 3, 4, 5})),
    }
    assert found.stages([0, 1, 2, 3]) == [(1, 2, 4), (0, 3), (5,)]
    assert found.stages([0, 3]) == [(0, 1, 2, 3, 4, 5)]
