"""A placement is measured, and the profile corrected, by a clock that counts operations; what
cannot be is refused."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from refined import (
    PLACES,
    TOKENS,
    flops,
    flops_clock,
    placed,
    refined_by_flops,
    small_gpt,
    token_loss,
)
from replicated import by_stage, replicated
from torch import Tensor, nn
from torch.nn import functional

import placer
from placer import Placement, PlacementRequest, zoo
from placer.errors import InputError
from placer.schema import Constraints, LayerMap, Replica
from placer.testing import logical_devices

pytestmark = pytest.mark.usefixtures("one_thread")


def test_an_unknown_compiler_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(InputError, match="is not a backend of"):
        refined_by_flops(model, torch.randn(4, 8), training=True, compile="inductr")


def test_a_placement_that_recomputes_is_refined_without_its_question() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    x = torch.randn(256, 64)
    found = placer.profile(model, x, PLACES, training=True, progress=False, repeats=1)
    assert found.cluster is not None
    for limit in range(2**18, 2**21, 2**15):
        devices = [
            device.model_copy(update={"memory_bytes": limit}) for device in found.cluster.devices
        ]
        small = found.model_copy(
            update={"cluster": found.cluster.model_copy(update={"devices": tuple(devices)})}
        )
        asked = {
            "chunks": 8,
            "schedule": "fill-drain",
            "constraints": Constraints(recompute="auto"),
        }
        placement = placer.solve(PlacementRequest(profile=small, **asked))
        if placement.layer_devices:
            break
    assert placement.recompute
    refined = placer.refine(placement, model, x, profile=small, rounds=1, timer=flops_clock)
    assert refined.placement.recompute


def test_of_several_sizes_of_micro_batches_the_one_that_was_placed_is_corrected() -> None:
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2))), torch.randn(4, 8)
    large, small = (
        placer.profile(model, batch, PLACES, training=True, progress=False, repeats=1)
        for batch in (x, x[:2])
    )
    request = PlacementRequest(
        profile=large, profiles=(small,), objective="step", batch_size=4, schedule="auto"
    )
    asked = request.model_copy(update={"profile": small, "profiles": ()})
    placement = placer.solve(asked)
    refined = placer.refine(placement, model, x[:2], request=request, rounds=1, timer=flops_clock)
    assert refined.profile.batch_size == refined.placement.batch_size == 2
    assert sum(stage.forward_ms for stage in refined.rounds[0].stages) == flops(
        lambda: model(x[:2])
    )


@pytest.mark.exhaustive
def test_refining_runs_among_logical_devices() -> None:
    with logical_devices(2):
        found = refined_by_flops(
            small_gpt(), TOKENS.clone(), training=True, loss_fn=token_loss, target=TOKENS
        )
    assert found.rounds


def test_without_a_profile_one_is_made_of_the_placements_layers() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    _, placement = placed(model, x, training=False)
    refined = placer.refine(placement, model, x, rounds=1, timer=flops_clock)
    assert [layer.name for layer in refined.profile.layers] == list(placement.layer_devices)


def test_a_refinement_is_json_and_back() -> None:
    found = refined_by_flops(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8), training=False
    )
    assert placer.Refinement.model_validate_json(found.to_json()) == found


@dataclass
class _Output:
    logits: Tensor
    loss: Tensor


class _ComputesItsLoss(nn.Module):
    """As models of transformers do: an object comes back that has the result and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, labels: Tensor) -> _Output:
        logits = self.last(self.first(x))
        return _Output(logits, functional.cross_entropy(logits, labels))


def test_a_model_that_computes_its_own_loss_and_returns_an_object_is_refined_without_one() -> None:
    # its tensors were not found in the object, and a loss_fn was asked for, which needed a target
    batch = {"x": torch.randn(4, 8), "labels": torch.arange(4)}
    found = refined_by_flops(_ComputesItsLoss(), batch, training=True, rounds=1)
    assert all(stage.backward_ms > 0 for stage in found.rounds[0].stages)


@pytest.mark.parametrize(("replicas", "stages"), [(2, 1), (2, 2)])
def test_the_stages_of_one_replica_are_measured_with_its_share(replicas: int, stages: int) -> None:
    model, x = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), torch.randn(8, 16)
    places = [f"cpu:{index}" for index in range(replicas * stages)]
    placement = replicated(model, replicas, stages, samples=(8,) * replicas, chunks=2)
    with logical_devices(len(places)):
        found = placer.profile(model, x, places, training=True, progress=False, repeats=1)
        refined = placer.refine(placement, model, x, profile=found, rounds=1, timer=flops_clock)
    (only,) = refined.rounds
    assert [stage.device for stage in only.stages] == places[:stages]
    assert sum(stage.forward_ms for stage in only.stages) == flops(lambda: model(x))
    loss = model(x).mean()
    assert sum(stage.backward_ms for stage in only.stages) == flops(lambda: loss.backward())  # type: ignore[no-untyped-call]
    assert only.placement.replicas == placement.replicas
    # the evaluation of a map by hand takes another way
    request = PlacementRequest(profile=refined.profile, objective="step", chunks=2 * replicas)
    given = LayerMap(layer_devices=placement.layer_devices, replicas=placement.replicas)
    judged = placer.evaluate(request, given, best=False)
    assert only.measured_value == pytest.approx(judged.objective_value, rel=1e-12)


@pytest.mark.parametrize("counts", [(2, 1), (1, 2)])
def test_of_stages_with_their_own_numbers_of_replicas_units_are_measured(
    counts: tuple[int, int],
) -> None:
    model, x = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), torch.randn(8, 16)
    places = [f"cpu:{index}" for index in range(3)]
    one = by_stage(model, counts, chunks=2)
    members = {
        first: tuple(Replica(device=held.device, samples=8 * held.samples) for held in replicas)
        for first, replicas in one.replicas.items()
    }
    placement = one.model_copy(update={"batch_size": 16, "replicas": members})
    with logical_devices(len(places)):
        found = placer.profile(model, x, places, training=True, progress=False, repeats=1)
        refined = placer.refine(placement, model, x, profile=found, rounds=1, timer=flops_clock)
    (only,) = refined.rounds
    assert [stage.device for stage in only.stages] == ["cpu:0", f"cpu:{counts[0]}"]
    assert sum(stage.forward_ms for stage in only.stages) == flops(lambda: model(x))
    assert only.placement.replicas == members
    # the evaluation of a map by hand takes another way
    request = PlacementRequest(profile=refined.profile, objective="step", chunks=4)
    given = LayerMap(layer_devices=placement.layer_devices, replicas=members)
    judged = placer.evaluate(request, given, best=False)
    assert only.measured_value == pytest.approx(judged.objective_value, rel=1e-12)


def shared_by(samples: Sequence[int]) -> Placement:
    """A placement of a layer on several devices with these shares."""
    members = tuple(
        Replica(device=f"cpu:{number}", samples=size) for number, size in enumerate(samples)
    )
    return Placement(
        status="optimal",
        objective="step",
        training=True,
        layer_devices={"0": "cpu:0"},
        replicas={"cpu:0": members},
        batch_size=sum(samples),
    )


def test_replicas_with_unequal_shares_are_refused() -> None:
    with pytest.raises(InputError, match=r"of cpu:0 compute \[3, 1\] samples; refine measures eq"):
        placer.refine(shared_by((3, 1)), nn.Linear(2, 2), torch.zeros(1, 2))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"type": "other"}, "the devices are of the types cpu .*, other; refine measures replicas"),
        ({"name": "cpu:7"}, "has a replica on 'cpu:1', which the request has not"),
        ({"objective": "latency"}, "the request asks for objective 'latency' of training, where"),
        ({"inputs": torch.zeros(4, 2)}, "are a micro-batch of 4, and the profile is of one of 2"),
        ({"samples": 4}, "the replica is of micro-batches of 4, and the profile is of one of 2"),
    ],
)
def test_replicas_that_do_not_fit_the_request_are_refused(
    wrong: dict[str, Any], message: str
) -> None:
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.zeros(2, 2)
    found = placer.profile(model, x, PLACES, training=True, progress=False, repeats=1)
    assert found.cluster is not None
    request = PlacementRequest(profile=found, objective="step", chunks=2)
    first, second = found.cluster.devices
    changed = {key: value for key, value in wrong.items() if key in ("type", "name")}
    devices = (first, second.model_copy(update=changed))
    cluster = found.cluster.model_copy(update={"devices": devices})
    request = request.model_copy(
        update={"cluster": cluster, "objective": wrong.get("objective", "step")}
    )
    placement = replicated(model, 2, samples=(wrong.get("samples", 2),) * 2)
    with pytest.raises(InputError, match=message):
        placer.refine(placement, model, wrong.get("inputs", x), request=request, timer=flops_clock)


def test_a_placement_of_generations_is_refused() -> None:
    placement = Placement(status="optimal", objective="generation", layer_devices={"a": "cpu:0"})
    with pytest.raises(InputError, match="whose two passes refine does not measure"):
        placer.refine(placement, nn.Linear(2, 2), torch.zeros(1, 2))


def test_a_placement_of_nothing_is_refused() -> None:
    empty = Placement(status="infeasible", objective="throughput")
    with pytest.raises(InputError, match="infeasible and places no layer"):
        placer.refine(empty, nn.Linear(2, 2), torch.randn(2, 2))
    with pytest.raises(
        InputError, match="placement is a dict; give one that suggest or solve returned"
    ):
        placer.refine(empty.model_dump(), nn.Linear(2, 2), torch.randn(2, 2))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": small_gpt}, "give an nn.Module"),
        ({"model": nn.Linear}, r"model is the class Linear; give an instance, such as Linear\(\)"),
        (
            {"profile": "profile.json"},
            "profile is a str; give a Profile, which Profile.model_validate_json",
        ),
        ({"request": "request.json"}, "request is a str; give a PlacementRequest"),
        ({"rounds": "3"}, "RefineOptions.rounds: should be a valid integer, not '3'"),
        ({"rounds": 0}, "RefineOptions.rounds: should be greater than or equal to 1, not 0"),
        ({"repeats": 0}, "RefineOptions.repeats: should be greater than or equal to 1, not 0"),
        ({"target": TOKENS}, "target is given without loss_fn"),
        (
            {"loss_fn": token_loss},
            "loss_fn is given without target; give both to measure the loss, or neither",
        ),
        (
            {"model": zoo.gpt(3, 16, 2, 16, 50)},
            r"GPT have \d+ bytes of parameters, the profile's layers \d+",
        ),
        ({"loss_fn": nn.CrossEntropyLoss, "target": TOKENS}, r"such as CrossEntropyLoss\(\)"),
        ({"example_inputs": TOKENS[:1]}, "a micro-batch of 1, and the profile is of one of 2"),
        (
            {"example_inputs": TOKENS.numpy()},
            "example_inputs, a ndarray, contain no tensor; convert",
        ),
        (
            {"loss_fn": token_loss, "target": TOKENS.numpy()},
            r"the target has a numpy array of shape \(2, 16\); convert it",
        ),
        ({"placement": {"layer_devices": {"0": "cpu:0"}}}, "a layer '0', and the profile has none"),
        (
            {"placement": {"batch_size": 8}},
            "the placement is of micro-batches of 8, and the profile is of one of 2",
        ),
    ],
)
def test_what_cannot_be_refined_is_named_and_the_model_left_alone(
    wrong: dict[str, Any], message: str
) -> None:
    model = small_gpt()
    found, placement = placed(model, TOKENS, training=True)
    if wrong.get("placement"):
        wrong = {"placement": placement.model_copy(update=wrong["placement"])}
    given = {
        "placement": placement,
        "model": model,
        "example_inputs": TOKENS,
        "profile": found,
        "timer": flops_clock,
    }
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match=message):
        placer.refine(**given | wrong)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
