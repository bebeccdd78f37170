"""``suggest_together``: several models are measured and placed under one memory budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusion import STEPS, Pipeline
from joint_requests import chain, pair
from torch import nn

from placer import ModelUse, suggest_together
from placer.errors import InfeasibleError, InputError
from placer.schema import Constraints, Layer, Profile, SolveOptions
from placer_client.client import Client
from placer_server.app import background
from placer_server.settings import Settings


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PLACER_URL", raising=False)


def _profile(weights: int = 50, memory: int = 60, ms: float = 1.0) -> Profile:
    layers = [
        Layer(name=name, forward_ms={"a": ms}, param_bytes=weights) for name in ("first", "second")
    ]
    return chain(pair(memory), *layers, edge_bytes=10)


def _uses() -> dict[str, ModelUse]:
    return {"encoder": ModelUse(_profile()), "unet": ModelUse(_profile(ms=2.0), runs=50)}


def test_models_are_measured_and_placed_together() -> None:
    pipeline = Pipeline()
    found = suggest_together(
        pipeline.uses(), devices=["cpu:0", "cpu:1"], repeats=1, cache=False, progress=False
    )
    assert found.runs == {"text_encoder": 1, "unet": STEPS, "decoder": 1}
    weights = sum(
        one.numel() * one.element_size()
        for model in pipeline.models().values()
        for one in model.parameters()
    )
    assert sum(load.memory.param_bytes for load in found.devices) == weights
    latencies = {name: one.objective_value or 0.0 for name, one in found.placements.items()}
    total = sum(found.runs[name] * ms for name, ms in latencies.items())
    assert found.request_ms == pytest.approx(total)
    assert not any(placement.training for placement in found.placements.values())


def test_profiles_are_placed_without_measuring_again() -> None:
    found = suggest_together(
        {"encoder": ModelUse(_profile(memory=110)), "unet": ModelUse(_profile(memory=110))}
    )
    homes = [set(one.layer_devices.values()) for one in found.placements.values()]
    assert sorted(map(sorted, homes)) == [["cpu:0"], ["cpu:1"]]


def test_constraints_name_layers_with_their_model() -> None:
    profile = _profile(memory=250)
    found = suggest_together(
        {"encoder": ModelUse(profile), "unet": ModelUse(profile, runs=3)},
        options=SolveOptions(constraints=Constraints(pinned={"unet/second": "cpu:1"})),
    )
    assert found.placements["unet"].layer_devices["second"] == "cpu:1"


def test_latency_of_inference_may_be_named() -> None:
    uses = {"encoder": ModelUse(_profile(memory=250))}
    assert suggest_together(uses, objective="latency", training=False).request_ms == 2.0


def test_a_server_solves_the_same_request() -> None:
    uses = {
        "encoder": ModelUse(_profile(memory=110)),
        "unet": ModelUse(_profile(memory=110), runs=3),
    }
    with background(Settings(database=":memory:", port=0)) as url:
        there, here = suggest_together(uses, server=url), suggest_together(uses)
        assert there.request_ms == here.request_ms and there.runs == here.runs
        with pytest.raises(InfeasibleError, match="80 B short"):
            suggest_together(_uses(), server=url)
        with Client(url) as client:
            asked = client.request(there.joint.id)
    assert asked.objective == "latency" and len(asked.profile.layers) == 4


def test_too_little_memory_for_all_models_is_an_error_with_the_reason() -> None:
    with pytest.raises(InfeasibleError, match="80 B short"):
        suggest_together(_uses())


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([nn.Linear(2, 2)], "models is a list; give a dict from names to placer.ModelUse"),
        ({}, "models is empty"),
        ({"unet": nn.Linear(2, 2)}, r"models\['unet'\] is a Linear; give placer.ModelUse"),
        ({"unet": ModelUse("unet")}, "model is a str; give an nn.Module"),  # type: ignore[arg-type]
    ],
)
def test_models_of_other_kinds_are_refused(models: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        suggest_together(models)


@pytest.mark.parametrize("runs", [0, 1.5, True, 10**7])
def test_a_number_of_runs_that_is_none_is_refused(runs: Any) -> None:
    with pytest.raises(InputError, match=f"runs is {runs}; give"):
        ModelUse(nn.Linear(2, 2), torch.zeros(1, 2), runs=runs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "throughput"}, "objective is 'throughput', but models that are used"),
        ({"objective": "memory"}, "objective is 'memory', but models that are used one after"),
        ({"training": True}, "training is True"),
        ({"chunks": 4}, "chunks is 4"),
        ({"loss_fn": sum}, "loss_fn is"),
        ({"devices": 2}, "only profiles are given, so their clusters count"),
        ({"server": "localhost:80"}, "server 'localhost:80' is not the URL of a service"),
        ({"constraint": None}, "no argument 'constraint'; did you mean 'constraints'"),
        ({"chunk": 4}, "no argument 'chunk'; there are 'models', 'devices', "),
        ({"field": 4}, "no argument 'field'; there are 'models', 'devices', "),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], message: str) -> None:
    uses = {"encoder": ModelUse(_profile(memory=250))}
    with pytest.raises(InputError, match=message):
        suggest_together(uses, **options)
