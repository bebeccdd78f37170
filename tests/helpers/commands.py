"""The command line, run in the test's own process, and a small profile to run it on."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

from placer.schema import Cluster, Device, Edge, Layer, Link, Placement, Profile

MIB = 1024**2
TOY = ("placer.zoo.toy:ToyModel", "--input", "4x10", "--devices", "2")


class Answer(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def placement(self) -> Placement:
        return Placement.model_validate_json(self.out)

    @property
    def profile(self) -> Profile:
        return Profile.model_validate_json(self.out)


Run = Callable[..., Answer]


def chain(times_ms: list[float], limit_bytes: int = 64 * MIB, param_bytes: int = MIB) -> Profile:
    """Layers in a row over two devices whose link costs next to nothing."""
    names = [f"l{index}" for index in range(len(times_ms))]
    return Profile(
        model="Chain",
        layers=tuple(
            Layer(name=name, module="Linear", forward_ms={"fast": time}, param_bytes=param_bytes)
            for name, time in zip(names, times_ms, strict=True)
        ),
        edges=tuple(Edge(source=a, targets=(b,), bytes=8) for a, b in itertools.pairwise(names)),
        cluster=Cluster(
            devices=tuple(
                Device(name=f"cuda:{i}", type="fast", memory_bytes=limit_bytes) for i in range(2)
            ),
            links=(
                Link(source="cuda:0", target="cuda:1", bandwidth_bytes_per_s=1e12),
                Link(source="cuda:1", target="cuda:0", bandwidth_bytes_per_s=1e12),
            ),
        ),
    )
