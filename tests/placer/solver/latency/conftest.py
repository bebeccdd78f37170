"""Requests for a small latency."""

import itertools

import pytest

from placer.schema import Cluster, Device, Edge, Layer, Link, PlacementRequest, Profile
from placer.solver.problem import Problem


@pytest.fixture
def rows():
    """``rows(times, devices=..., ...)``: rows of layers, by row the time of each.

    Nothing goes between rows.
    """

    def make(times_ms, devices=2, training=False, saved_bytes=0, memory_bytes=1_000, **asked):
        layers, edges = [], []
        for row, times in enumerate(times_ms):
            names = [f"r{row}l{index}" for index in range(len(times))]
            for name, time in zip(names, times, strict=True):
                layers.append(
                    Layer(
                        name=name,
                        forward_ms={"t": time},
                        backward_ms={"t": 2 * time} if training else {},
                        param_bytes=1,
                        saved_bytes=saved_bytes,
                    )
                )
            edges += [
                Edge(source=one, targets=(other,), bytes=1)
                for one, other in itertools.pairwise(names)
            ]
        names = [f"d{index}" for index in range(devices)]
        cluster = Cluster(
            devices=[Device(name=name, type="t", memory_bytes=memory_bytes) for name in names],
            links=[
                Link(source=a, target=b, bandwidth_bytes_per_s=1e3)
                for a, b in itertools.permutations(names, 2)
            ],
        )
        profile = Profile(layers=layers, edges=edges, training=training, cluster=cluster)
        return Problem.from_request(PlacementRequest(profile=profile, objective="latency", **asked))

    return make
