"""A training step whose optimizer needs other memory than the placement assumed says so before its
first step.

A benchmark profiled ``"adam"`` and trained with fused Adam: 10 GB of each GPU were kept free for
temporaries that only the foreach version makes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import placer
from placer import Constraints, DataFlow, Placement, PlacementRequest, devices
from placer.utils.units import bytes_text

NAMES = ["cpu:0", "cpu:1"]
WIDTH, LAYERS = 64, 4
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)
Make = Callable[[Sequence[nn.Parameter]], Any]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def _placed(model: nn.Module, optimizer: Any, names: Sequence[str] = NAMES) -> Placement:
    """Two layers on each device, profiled with an optimizer."""
    found = placer.profile(
        model,
        torch.randn(8, WIDTH),
        names,
        optimizer=optimizer,
        granularity="submodule",
        repeats=1,
        progress=False,
    )
    pinned = {layer.name: names[2 * index // LAYERS] for index, layer in enumerate(found.layers)}
    rules = Constraints(contiguous=True, pinned=pinned)
    return placer.solve(PlacementRequest(profile=found, chunks=2, constraints=rules))


def _flow(model: nn.Module, placement: Placement, names: Sequence[str] = NAMES) -> DataFlow:
    flow = DataFlow(model, list(names))
    flow.update_flow(placement)
    return flow


def _said(flow: DataFlow, optimizer: Any) -> list[str]:
    """The warnings of making a step."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        flow.train_step(functional.mse_loss, optimizer)
    return [str(one.message) for one in caught]


SAME: dict[str, tuple[Any, Make]] = {
    "the same": ("adam", torch.optim.Adam),
    "another one with as much": ("adam", torch.optim.AdamW),
    "a list": ("adam", lambda given: [torch.optim.Adam(given)]),
    "of a class": (torch.optim.SGD, torch.optim.SGD),
    "of a function": (
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    ),
    "factored": ("adafactor", torch.optim.Adafactor),
    "none": (None, lambda given: None),
}


@pytest.mark.covering(every=4)
@pytest.mark.parametrize(("profiled", "make"), SAME.values(), ids=SAME)
def test_an_optimizer_with_as_much_memory_is_not_warned_of(profiled: Any, make: Make) -> None:
    model = _model()
    assert _said(_flow(model, _placed(model, profiled)), make(list(model.parameters()))) == []


STEPS = 4 * 2 * LAYERS // 2
"""Bytes of Adam's counters of two layers, a weight and a bias each."""
OTHER: dict[str, tuple[Any, Make, int, int]] = {
    "more": ("sgd", torch.optim.Adam, 4 * LAYER_BYTES + STEPS, 0),
    "less": ("adam", torch.optim.SGD, 0, 4 * LAYER_BYTES + STEPS),
    "none was profiled": (None, torch.optim.Adam, 4 * LAYER_BYTES + STEPS, 0),
    "an option": (
        "adam",
        partial(torch.optim.Adam, amsgrad=True),
        6 * LAYER_BYTES + STEPS,
        4 * LAYER_BYTES + STEPS,
    ),
    "a list": (
        "sgd",
        lambda given: [torch.optim.Adam(given[:4]), torch.optim.SGD(given[4:])],
        0,
        0,
    ),
}


@pytest.mark.covering(every=2)
@pytest.mark.parametrize(("profiled", "make", "needed", "assumed"), OTHER.values(), ids=OTHER)
def test_an_optimizer_with_other_memory_is_warned_of_with_both_amounts(
    profiled: Any, make: Make, needed: int, assumed: int
) -> None:
    model = _model()
    optimizer = make(list(model.parameters()))
    (said,) = _said(_flow(model, _placed(model, profiled)), optimizer)
    if isinstance(optimizer, list):  # the first device's layers alone have state
        needed = 4 * LAYER_BYTES + STEPS
        assert "more device" not in said
    assert f"{bytes_text(needed)} of state, where {bytes_text(assumed)} were assumed" in said
    assert "profile(..., optimizer=optimizer)" in said


def test_the_warning_changes_nothing() -> None:
    model = _model()
    flow = _flow(model, _placed(model, "sgd"))
    optimizer = torch.optim.Adam(model.parameters())
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert len(_said(flow, optimizer)) == 1
    assert torch.equal(torch.get_rng_state(), random) and not optimizer.state
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_placement_without_amounts_and_a_map_of_the_users_own_assume_nothing() -> None:
    model = _model()
    optimizer, placement = torch.optim.Adam(model.parameters()), _placed(model, "sgd")
    by_hand = Placement(
        status="feasible", objective="throughput", layer_devices=placement.layer_devices
    )
    assert _said(_flow(model, by_hand), optimizer) == []
    loads = tuple(
        load.model_copy(update={"device": f"d{index}"})
        for index, load in enumerate(placement.devices)
    )
    renamed = placement.model_copy(update={"devices": loads})
    assert _said(_flow(model, renamed), optimizer) == []
    flow = _flow(model, placement)
    flow.layer_gpus["1"] = 1
    flow.update_flow()
    assert _said(flow, optimizer) == []


def test_an_optimizer_that_cannot_be_tried_is_not_warned_of() -> None:
    class Picky(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise RuntimeError("not today")

    model = _model()
    assert _said(_flow(model, _placed(model, "adam")), Picky(model.parameters(), lr=0.1)) == []


def test_temporaries_that_the_placement_assumed_and_the_optimizer_does_not_make_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a device whose memory is counted, as a GPU's is; the host steps parameters one by one."""
    model = _model()
    placement = _placed(model, "adam").model_copy(update={"optimizer_workspace_ratio": 1.0})
    flow, optimizer = _flow(model, placement), torch.optim.Adam(model.parameters())
    monkeypatch.setattr(devices, "counts_bytes", lambda device: True)
    (said,) = _said(flow, optimizer)
    assert (
        f"of state and 0 B of temporaries, where {bytes_text(4 * LAYER_BYTES + STEPS)} and" in said
    )
    assert f"and {bytes_text(2 * LAYER_BYTES)} were assumed for Adam" in said
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    assert _said(flow, optimizer) == []


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_on_gpus_the_temporaries_of_the_real_optimizer_are_assumed(fused: bool) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    names, model = ["cuda:0", "cuda:1"], _model()
    kinds: dict[bool, dict[str, bool]] = {True: {"fused": True}, False: {"foreach": True}}
    placement = _placed(model, partial(torch.optim.Adam, **kinds[fused]), names)
    assert placement.optimizer_workspace_ratio == pytest.approx(0.0 if fused else 1.0, abs=0.01)
    flow = _flow(model, placement, names)
    assert _said(flow, torch.optim.Adam(model.parameters(), **kinds[fused])) == []
    (said,) = _said(flow, torch.optim.Adam(model.parameters(), **kinds[not fused]))
    assert "of temporaries" in said
