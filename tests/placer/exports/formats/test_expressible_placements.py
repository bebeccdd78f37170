"""Every placement of small models: what a format expresses is exported, read back, and solved for.

The groups of layers that a format keeps together are written down here by hand.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random

import pytest
from enumeration import Enumeration
from exported import placed

from placer.errors import PlacementError
from placer.exports.formats import format_named
from placer.schema import (
    Cluster,
    Constraints,
    Device,
    Edge,
    Layer,
    Link,
    PlacementRequest,
    Profile,
    TiedParameters,
)
from placer.schema.base import FormatName
from placer.solver.check import check
from placer.solver.solve import solve

DEVICES = ["cuda:0", "cuda:1", "cuda:2"]

CASES: list[tuple[FormatName, str]] = [
    ("accelerate", "embed | h.0.a h.0.b | norm | head"),
    ("accelerate", "a | b+c b@1 | d"),
    ("accelerate", "h.0.a h.0.b h.1.a+h.0.c h.1.b | h.2"),
    ("deepspeed", "0 | 1.a 1.b | 2 | 3"),
    ("deepspeed", "0 | 1+2.a 2.b | 4.a 4.b"),
    ("pipelining", "embed | h.0.a | h.0.b act | h.1 act@1"),
    ("pipelining", "a | b+c | d c@1 | e"),
    ("torchgpipe", "first | second.a second.b | third"),
    ("torchgpipe", "0 | 2 3 2@1 | 4.a 4.b"),
    ("torchtitan", "embed | layers.0.a layers.0.b | layers.1 | norm"),
    ("torchtitan", "embed.a embed.b | layers.0+layers.1.a layers.1.b | layers.2"),
]
"""Layers in execution order; ``|`` separates what the format may put on several devices."""


def groups_of(case: str) -> list[list[str]]:
    return [group.split() for group in case.split("|")]


def maps(name: FormatName, case: str) -> Iterator[tuple[dict[str, str], bool]]:
    """Yield every assignment of layers to devices, and whether the format expresses it."""
    groups = groups_of(case)
    layers = [layer for group in groups for layer in group]
    for choice in itertools.product(DEVICES, repeat=len(layers)):
        where = dict(zip(layers, choice, strict=True))
        whole = all(len({where[layer] for layer in group}) == 1 for group in groups)
        runs = [device for device, _ in itertools.groupby(choice)]
        yield where, whole and (name == "accelerate" or len(runs) == len(set(runs)))


@pytest.mark.parametrize(("name", "case"), CASES)
def test_the_expressible_placements_are_exported_and_read_back_and_no_others(
    name: FormatName, case: str
) -> None:
    exported = 0
    for where, expressible in maps(name, case):
        if not expressible:
            with pytest.raises(PlacementError, match=f"for_format='{name}'"):
                placed(where).export(name)
            continue
        text = placed(where).export(name).text
        devices = DEVICES if name == "accelerate" else list(dict.fromkeys(where.values()))
        assert format_named(name).read(text, list(where), devices) == where
        exported += 1
    assert exported > 3


def request(name: FormatName, case: str, seed: int) -> PlacementRequest:
    """Return a request for a chain of layers with random times, values and memory."""
    random = Random(seed)
    layers = [layer for group in groups_of(case) for layer in group]
    kinds = [random.choice("ab") for _ in DEVICES]
    devices = [
        Device(name=device, type=kind, memory_bytes=random.choice([4, 8, 100]))
        for device, kind in zip(DEVICES, kinds, strict=True)
    ]
    return PlacementRequest(
        profile=Profile(
            layers=[
                Layer(
                    name=layer,
                    forward_ms={kind: random.randint(0, 9) for kind in set(kinds)},
                    param_bytes=random.randint(0, 3),
                )
                for layer in layers
            ],
            edges=[
                Edge(source=before, targets=(after,), bytes=random.randint(0, 4))
                for before, after in itertools.pairwise(layers)
            ],
            cluster=Cluster(
                devices=devices,
                links=[
                    Link(source=a, target=b, bandwidth_bytes_per_s=1e3)
                    for a, b in itertools.permutations(DEVICES, 2)
                ],
            ),
        ),
        constraints=Constraints(contiguous=False if name == "accelerate" else None),
        for_format=name,
        workers=1,
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "case"), CASES)
def test_the_solver_finds_the_best_placement_that_the_format_expresses(
    name: FormatName, case: str, seed: int
) -> None:
    asked = request(name, case, seed)
    every = Enumeration(asked, contiguous=name != "accelerate")
    values = [every.value(where) for where, expressible in maps(name, case) if expressible]
    best = min((value for value in values if value is not None), default=None)
    placement = solve(asked)
    check(asked, placement)
    if best is None:
        assert placement.status == "infeasible"
        return
    assert placement.status == "optimal"
    assert placement.objective_value == pytest.approx(best, rel=2e-6)
    placement.export(name)


@pytest.mark.parametrize(
    ("name", "stages"), [("torchgpipe", 1), ("accelerate", 2), ("deepspeed", 3), ("pipelining", 3)]
)
def test_layers_that_share_parameters_are_apart_only_if_the_engine_copies_them(
    name: FormatName, stages: int
) -> None:
    asked = request(name, "0 | 1 | 2", seed=0)
    profile = asked.profile.model_copy(
        update={
            "layers": tuple(
                Layer(name=layer, forward_ms={"a": 5, "b": 5}, param_bytes=1) for layer in "012"
            ),
            "colocated": (("0", "2"),),
            "tied": (TiedParameters(layers=("0", "2"), param_bytes=1),),
            "cluster": asked.profile.cluster.model_copy(
                update={
                    "devices": tuple(
                        Device(name=device, type="a", memory_bytes=100) for device in DEVICES
                    )
                }
            ),
        }
    )
    placement = solve(asked.model_copy(update={"profile": profile}))
    assert len(set(placement.layer_devices.values())) == stages
    assert placement.export(name).format == name
