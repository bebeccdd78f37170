"""Options whose wrong types Python would accept silently."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import placer
from placer.errors import InputError, PlacerError
from placer.schema import Cluster, Constraints, Device, Layer, Profile, SolveOptions
from placer.testing import logical_devices
from placer.utils.option_checks import require_flags

X = torch.zeros(2, 4)
PROFILE = Profile(
    layers=[Layer(name="only", forward_ms={"cpu": 1})],
    edges=[],
    training=False,
    cluster=Cluster(devices=[Device(name="cpu:0", type="cpu", memory_bytes=1)]),
)


def _flow() -> placer.DataFlow:
    return placer.DataFlow(nn.Linear(4, 4), device_ids=["cpu:0"])


def _step() -> Any:
    flow = _flow()
    flow.update_flow()
    return flow.train_step(nn.functional.mse_loss)


CALLS: dict[str, Callable[[Any], Any]] = {
    "clear_cache": lambda flag: placer.DataFlow(nn.Linear(4, 4), clear_cache=flag),
    "record": lambda flag: _flow().applied(record=flag),
    "update": lambda flag: _step()(X, X, update=flag),
    "outputs": lambda flag: _step()(X, X, outputs=flag),
    "flow.deferred_batch_norm": lambda flag: setattr(_flow(), "deferred_batch_norm", flag),
    "flow.gradients_wait": lambda flag: setattr(_flow(), "gradients_wait", flag),
    "hooks": lambda flag: placer.capture_graph(nn.Linear(4, 4), (X,), hooks=flag),
    "training": lambda flag: placer.profile(nn.Linear(4, 4), X, training=flag),
    "progress": lambda flag: placer.suggest(nn.Linear(4, 4), X, progress=flag),
    "best": lambda flag: placer.evaluate(PROFILE, {}, best=flag),
    "SuggestOptions.explain": lambda flag: placer.suggest(PROFILE, explain=flag),
}


@pytest.mark.parametrize("wrong", ["no", 1, X])
@pytest.mark.parametrize("name", CALLS)
def test_a_flag_of_another_type_is_refused_by_name(name: str, wrong: Any) -> None:
    with pytest.raises(InputError, match=rf"{name}[ :].*(True or False|boolean)"):
        CALLS[name](wrong)


def test_numpys_flags_are_flags() -> None:
    require_flags(update=np.bool_(True), outputs=np.array([False])[0])


NUMBERS: dict[str, Callable[[Any], Any]] = {
    "chunks": lambda number: _flow()(X, chunks=number),
    "in_flight": lambda number: _flow().stream([X], in_flight=number),
    "count": lambda number: logical_devices(number).__enter__(),
    "batch_sizes": lambda number: placer.profile(nn.Linear(4, 4), X, batch_sizes=[number]),
    "SuggestOptions.batch_size": lambda number: placer.suggest(PROFILE, batch_size=number),
    "SolveOptions.time_limit_s": lambda number: placer.evaluate(PROFILE, {}, time_limit_s=number),
    "EstimateOptions.generate": lambda number: placer.estimate(nn.Linear(4, 4), X, generate=number),
    "SolveOptions.constraints.max_devices": lambda number: SolveOptions(
        constraints={"max_devices": number}
    ),
}


@pytest.mark.parametrize("wrong", ["2", True])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_text_or_a_flag_is_not_a_number(name: str, wrong: Any) -> None:
    with pytest.raises(InputError, match=name):
        NUMBERS[name](wrong)


@pytest.mark.parametrize("wrong", [True, "2 bananas"])
def test_a_memory_limit_is_a_number_or_a_size_with_a_unit(wrong: Any) -> None:
    with pytest.raises(InputError, match=str(wrong)):
        placer.profile(nn.Linear(4, 4), X, memory_bytes=wrong)


def test_a_whole_number_may_be_written_as_a_float() -> None:
    assert Device(name="a", type="cpu", memory_bytes=24e9).memory_bytes == 24_000_000_000


def test_numbers_in_changed_copies_are_not_converted_either() -> None:
    with pytest.raises(InputError, match=r"Constraints\.max_devices: should be a number"):
        Constraints().model_copy(update={"max_devices": "2"})


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"progress": "bar"}, "progress"),
        ({"progress": True}, "progress"),
        ({"stop": True}, "stop"),
    ],
)
def test_what_solve_would_call_later_is_refused_before(options: Any, name: str) -> None:
    request = placer.PlacementRequest(profile=PROFILE)
    with pytest.raises(PlacerError, match=f"^{name} is"):
        placer.solve(request, **options)
    assert placer.solve(request, stop=threading.Event()).status == "optimal"


def test_the_output_device_may_be_named_later() -> None:
    flow = _flow()
    flow.output_device = "cpu:0"
    assert flow.output_device == torch.device("cpu:0")
    with pytest.raises(PlacerError, match="cpu:x"):
        flow.output_device = "cpu:x"
