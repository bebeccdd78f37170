"""A sharded step: by hand, by the referee, and its code."""

from __future__ import annotations

import math
from itertools import pairwise, permutations
from random import Random

import pytest
from replicated_steps import drawn_request
from small_requests import SHARE

from placer.errors import PlacementError
from placer.schema import (
    Cluster,
    Constraints,
    Device,
    Edge,
    Layer,
    Link,
    PlacementRequest,
    Profile,
    ShardedStep,
    TiedParameters,
)
from placer.solver.check import check
from placer.solver.replicas.sharding import sharded_step, units_of
from placer.solver.solve import solve

MB = 10**6
NAMES = ("embed", "blocks.0.a", "blocks.0.b", "blocks.1", "head")


def request(
    memory_bytes: int = 10**12, state_bytes: int = 8 * MB, **changed: object
) -> PlacementRequest:
    """Two devices and five layers; a link carries a megabyte in a millisecond."""
    layers = [
        Layer(
            name=name,
            forward_ms={"t": 3.0},
            backward_ms={"t": 5.0},
            optimizer_ms={"t": 2.0},
            param_bytes=4 * MB,
            grad_bytes=4 * MB,
            optimizer_bytes=state_bytes,
            saved_bytes=MB,
        )
        for name in NAMES
    ]
    edges = [Edge(source=a, targets=(b,), bytes=8, gradient_bytes=8) for a, b in pairwise(NAMES)]
    devices = [Device(name=f"d{i}", type="t", memory_bytes=memory_bytes) for i in range(2)]
    links = [
        Link(source=a.name, target=b.name, bandwidth_bytes_per_s=1000 * MB)
        for a, b in permutations(devices, 2)
    ]
    fields = {
        "profile": Profile(layers=tuple(layers), edges=tuple(edges), training=True),
        "cluster": Cluster(devices=tuple(devices), links=tuple(links)),
        "objective": "step",
        "batch_size": 4,
        **changed,
    }
    return PlacementRequest(**fields)


def test_a_step_on_two_devices_by_hand() -> None:
    found = sharded_step(request())
    assert found is not None
    # Half of a unit's bytes cross the link: 4 ms of blocks.0, 2 ms of blocks.1; embed and head are
    # the root unit, 4 ms. Runs: embed, blocks.0, blocks.1, head.
    # Forward: 4 (root), then embed 0-3 while blocks.0 is gathered until 4 (it begins at 0),
    # blocks.0 4-10 with blocks.1 gathered 4-6, blocks.1 10-13, head 13-16.
    # Backward: head 0-5 with blocks.1 gathered 0-2, blocks.1 5-10 with blocks.0 gathered 5-9,
    # blocks.0 10-20; blocks.1 is reduced 10-12, blocks.0 20-24; embed 20-25; then the root, 4.
    per_micro_batch = (4 + 16) + (25 + 4)
    # Two micro-batches of one sample each, and half of the optimizer. Additions take little.
    assert found.step_ms == pytest.approx(2 * per_micro_batch + 5 * 2.0 / 2, rel=1e-3)
    assert found.compute_ms == 2 * 5 * (3 + 5)
    assert (found.batch_size, found.chunks) == (1, 2)
    assert found.modules == ("blocks.0", "blocks.1")
    # state: half of 20 + 20 + 40 MB; saved: 5 MB; root: 8 + 8 MB; blocks.0 and blocks.1: 12 + 12 MB
    assert found.memory_bytes == pytest.approx((40 + 5 + 16 + 24) * MB, rel=1e-3)


def test_it_is_reported_where_nothing_else_fits() -> None:
    together = Constraints(colocated=(NAMES,))
    # one device needs 125 MB for the whole model, and 105 MB for its part
    placement = solve(request(110 * MB, 16 * MB, constraints=together))
    assert placement.status == "infeasible"
    assert placement.sharded is not None
    assert "by fully sharded data parallelism, 100.1 MiB" in placement.sharded.text
    assert solve(request(100 * MB, 16 * MB, constraints=together)).sharded is None


def test_it_is_not_reported_where_it_is_hardly_shorter_or_not_possible() -> None:
    assert solve(request(replicas="auto")).sharded is None
    assert sharded_step(request(constraints=Constraints(max_devices=1))) is None
    assert sharded_step(request(batch_size=3)) is None
    one_way = request().placed_on
    one_way = one_way.model_copy(update={"links": one_way.links[:1]})
    assert sharded_step(request(cluster=one_way)) is None
    tied = request().profile.model_copy(
        update={
            "tied": (TiedParameters(layers=("embed", "blocks.1"), param_bytes=4 * MB),),
            "colocated": (("embed", "blocks.1"),),
        }
    )
    assert sharded_step(request(profile=tied)) is None


def test_units_are_blocks_or_else_children() -> None:
    assert units_of(["embed", "h.0.mlp", "h.1.mlp+h.2.mlp", "h.3@1"]) == ["", "h.0", "", "h.3"]
    assert units_of(["conv", "layer.a", "layer.b"]) == ["conv", "layer", "layer"]
    assert units_of(["(model)"]) == [""]


def named_anew(asked: PlacementRequest, random: Random) -> PlacementRequest:
    """The request with layers in blocks, and with times of the host."""
    old = [layer.name for layer in asked.profile.layers]
    new = dict(zip(old, sorted(random.sample(range(len(NAMES)), len(old))), strict=True))

    def changed(profile: Profile) -> Profile:
        layers = [
            one.model_copy(
                update={
                    "name": NAMES[new[one.name]],
                    "host_ms": dict.fromkeys(one.forward_ms, random.choice([0.0, 3.0])),
                }
            )
            for one in profile.layers
        ]
        edges = [
            one.model_copy(
                update={
                    "source": NAMES[new[one.source]],
                    "targets": tuple(NAMES[new[target]] for target in one.targets),
                }
            )
            for one in profile.edges
        ]
        return profile.model_copy(update={"layers": tuple(layers), "edges": tuple(edges)})

    return asked.model_copy(
        update={
            "profile": changed(asked.profile),
            "profiles": tuple(map(changed, asked.profiles)),
            "replicas": random.choice(["auto", "never"]),
        }
    )


def test_the_referee_agrees_on_random_requests() -> None:
    reported = 0
    for seed in range(math.ceil(300 * SHARE)):
        random = Random(seed)
        asked = named_anew(drawn_request(seed, unlike=seed % 3 == 0), random)
        reported += solve(asked).sharded is not None  # which the referee has checked
    assert reported >= 5


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"step_ms": 70.0}, "sharded.step_ms"),
        ({"memory_bytes": 1}, "sharded.memory_bytes"),
        ({"step_ms": 1e6}, "hardly shorter"),
        (None, "is not reported"),
    ],
)
def test_the_referee_refuses_what_is_not_so(changed: dict[str, float] | None, message: str) -> None:
    asked = request(constraints=Constraints(colocated=(NAMES,)), replicas="never")
    placement = solve(asked)
    assert placement.sharded is not None
    other = None if changed is None else placement.sharded.model_copy(update=changed)
    with pytest.raises(PlacementError, match=message):
        check(asked, placement.model_copy(update={"sharded": other}))


def test_its_code_shards_the_model_and_keeps_its_gradients() -> None:
    torch = pytest.importorskip("torch")
    from torch import distributed, nn

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))

    model, whole, x = make(), make(), torch.randn(3, 4)
    units = dict.fromkeys(units_of(["0", "1", "2.0", "2.1"]))
    step = ShardedStep(
        step_ms=1.0, compute_ms=1.0, memory_bytes=1, batch_size=3, chunks=1, modules=tuple(units)
    )
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        exec(step.code, {"model": model})
        model(x).sum().backward()
        whole(x).sum().backward()
        for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
            assert isinstance(mine, distributed.tensor.DTensor)
            torch.testing.assert_close(mine.grad.full_tensor(), other.grad)
    finally:
        distributed.destroy_process_group()
