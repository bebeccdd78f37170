"""Whatever the pace of devices and copies, a stream's accesses to every tensor have an order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from covering import named
from races import Races, Site, watched
from replicated import by_stage
from small_models import Skips
from splitting import scatter_layers, twins
from torch import Tensor, nn

from placer import DataFlow, devices
from placer.executor.engine import shape_cache
from placer.executor.engine.shape_cache import LatestShapes
from placer.testing import logical_devices
from placer.zoo import unet

MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "skips": (Skips, (4, 5)),
    "unet": (lambda: unet(width=2), (1, 3, 16, 16)),
}


def _stream(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    how: int | tuple[int, ...] | None,
    deaf: Site | None = None,
    batches: int = 6,
    rows: tuple[int, ...] = (4,),
) -> Races:
    """A caller who writes to all that is his as soon as he may: inputs, results, and weights."""
    make, shape = MODELS[name]
    model, _ = twins(make, training=False)
    with logical_devices(3) as places, watched(monkeypatch, deaf) as races:
        flow = _flow(model, how)
        let_go = LatestShapes.let_go

        def watched_let_go(self: LatestShapes[Any], key: Any) -> None:
            pipeline = self[key][1]
            let_go(self, key)
            for stage in pipeline.stages:
                for slot in stage.slots:
                    made = [*slot.inputs.values(), *slot.outputs.values()]
                    touch("next use of memory that a shape gave back", stage.device, *made)

        monkeypatch.setattr(LatestShapes, "let_go", watched_let_go)

        def touch(what: str, place: torch.device, *tensors: Any) -> None:
            races.run([("caller", place)], [], tensors, f"the caller's {what}")

        def source() -> Iterator[Tensor]:
            for number in range(batches):
                size = (rows[number % len(rows)], *shape[1:])
                batch = devices.copy(torch.randn(size, dtype=torch.float64), places[0])
                touch("making of a batch", places[0], batch)
                yield batch
                touch("next use of a batch's memory", places[0], batch)

        for _ in range(2):
            for place in places:
                own = [
                    parameter
                    for parameter in model.parameters()
                    if devices.location(parameter) == place
                ]
                touch("change of weights", place, *own)
            results = flow.stream(source())
            for _ in range(batches - 2):
                touch("work on a result", places[0], next(results))
            results.close()
    return races


def _flow(model: nn.Module, how: int | tuple[int, ...] | None) -> DataFlow:
    """Return a flow in parts, in places drawn with a seed, or with replicas of each stage."""
    flow = DataFlow(model, fine_grained=True)
    if isinstance(how, int):
        scatter_layers(flow, 3, how)
        return flow
    if how is not None:
        flow.update_flow(by_stage(model, how))
        return flow
    names = list(flow.layer_gpus)
    for index, name in enumerate(names):
        flow.layer_gpus[name] = index * 3 // len(names)
    flow.update_flow()
    return flow


@pytest.mark.covering
@pytest.mark.parametrize(
    "how", [None, 0, 1, (2, 1), (1, 2)], ids=["parts", "anyhow", "anyhow else", "2-1", "1-2"]
)
@pytest.mark.parametrize("name", named(dict(zip(MODELS, MODELS, strict=True)), ["unet"]))
def test_every_two_accesses_to_one_tensor_have_an_order(
    name: str, how: int | tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    races = _stream(monkeypatch, name, how)
    assert races.found == []
    assert len(races.sites) >= 6


def test_shapes_that_give_way_to_others_give_their_memory_back_when_nothing_uses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shape_cache, "KEPT_SHAPES", 2)
    races = _stream(monkeypatch, "skips", 0, batches=10, rows=(6, 5, 4, 3, 2))
    assert races.found == []


@pytest.mark.exhaustive
def test_every_place_in_the_code_that_waits_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    sites = _stream(monkeypatch, "skips", 0).sites
    idle = [site for site in sorted(sites) if not _stream(monkeypatch, "skips", 0, deaf=site).found]
    # A copy runs in the queues of both its devices, so that either's wait for what it reads would
    # do.
    assert [function for function, _ in idle] in ([], ["send_all"])
