"""``Profile.untied``: layers that share parameters may be on several devices, each further one with
a copy."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import placer
from placer import Constraints, DataFlow, PlacementRequest, Profile
from placer.errors import InfeasibleError, InputError
from placer.schema import Cluster, Device, Edge, Layer, Link, TiedParameters
from placer.testing import logical_devices
from placer.zoo import gpt


def _layer(name: str, ms: float = 1.0, **own: int) -> Layer:
    return Layer(name=name, forward_ms={"t": ms}, backward_ms={"t": 2 * ms}, **own)


def _profile(memory_bytes: int = 10_000, training: bool = True, **tie: Any) -> Profile:
    """An embedding, a body and a head that shares 100 bytes with the embedding, in a row."""
    layers = [
        _layer("embed", param_bytes=100, grad_bytes=100, optimizer_bytes=200),
        _layer("body", 4.0, param_bytes=7),
    ]
    layers += [_layer("head", param_bytes=3), _layer("again")]
    devices = [Device(name=name, type="t", memory_bytes=memory_bytes) for name in ("a", "b")]
    links = [
        Link(source=one, target=other, bandwidth_bytes_per_s=1e9) for one, other in ("ab", "ba")
    ]
    shared = TiedParameters(
        layers=("embed", "head", "again"), **({"gradient_bytes": 100, "param_bytes": 100} | tie)
    )
    return Profile(
        layers=layers,
        edges=[Edge(source=a.name, targets=(b.name,), bytes=1) for a, b in pairwise(layers)],
        colocated=(("embed", "head", "again"), ("head", "again")),
        tied=[shared],
        training=training,
        cluster=Cluster(devices=devices, links=links),
    )


def test_split_layers_share_no_device_but_for_other_reasons() -> None:
    given = _profile()
    untied = given.untied()
    assert untied.colocated == (("head", "again"),) and untied.layers == given.layers
    assert [tie.split for tie in untied.tied] == [True]
    assert untied.untied() == untied and given == _profile()


def _held(profile: Profile, **constraints: Any) -> dict[str, tuple[int, int, int]]:
    placement = placer.solve(
        PlacementRequest(profile=profile, constraints=Constraints(**constraints))
    )
    assert placement.status == "optimal"
    return {
        load.device: (load.memory.param_bytes, load.memory.grad_bytes, load.memory.optimizer_bytes)
        for load in placement.devices
    }


def test_a_device_without_the_first_layer_has_one_copy_its_gradient_and_no_optimizer_state() -> (
    None
):
    apart = {"embed": "a", "body": "a", "head": "b", "again": "b"}
    assert _held(_profile().untied(), pinned=apart) == {"a": (107, 100, 200), "b": (103, 100, 0)}


def test_one_device_has_what_it_shares_once() -> None:
    assert _held(_profile().untied(), max_devices=1, forbidden={"*": ["b"]})["a"] == (110, 100, 200)
    assert _held(_profile(memory_bytes=410, training=True).untied(), max_devices=1)["a"] == (
        110,
        100,
        200,
    )


def test_inference_splits_too_and_counts_the_parameters_on_both_devices() -> None:
    profile = _profile(training=False, gradient_bytes=0)
    held = _held(profile.untied(), contiguous=True)
    assert sorted(held.values()) == [(103, 0, 0), (107, 0, 0)]
    # all layers together need 110
    small = _profile(memory_bytes=109, training=False, gradient_bytes=0).untied()
    assert _held(small) == {"a": (107, 0, 0), "b": (103, 0, 0)}
    with pytest.raises(InfeasibleError, match="need"):
        placer.suggest(_profile(memory_bytes=101, training=False, gradient_bytes=0).untied())


def test_frozen_parameters_are_copied_without_a_gradient() -> None:
    frozen = _profile(gradient_bytes=0).untied()
    apart = {"embed": "a", "body": "a", "head": "b", "again": "b"}
    assert _held(frozen, pinned=apart)["b"] == (103, 0, 0)


def test_a_profile_that_does_not_tell_the_parameters_has_copies_as_large_as_the_gradients() -> None:
    apart = {"embed": "a", "body": "a", "head": "b", "again": "b"}
    assert _held(_profile(param_bytes=0).untied(), pinned=apart)["b"] == (103, 100, 0)


def test_the_original_is_in_the_layer_that_runs_first() -> None:
    layers = [_layer("embed", param_bytes=50), _layer("head")]
    with pytest.raises(
        InputError, match="'embed' runs first and has 50 bytes of parameters, but 100 of them"
    ):
        Profile(
            layers=layers,
            tied=[TiedParameters(layers=("embed", "head"), param_bytes=100, split=True)],
        )


def test_split_tied_is_true_or_false() -> None:
    with pytest.raises(InputError, match="split_tied: should be a valid boolean, not 'no'"):
        placer.suggest(_profile(), split_tied="no")


@pytest.mark.exhaustive
def test_embeddings_that_are_split_are_cut_like_a_chain_and_train_as_the_unsplit_model_does() -> (
    None
):
    torch.manual_seed(0)
    model = gpt(layers=4, width=16, heads=2, context=8, vocabulary=11, tied=True).double()
    reference, tokens = copy.deepcopy(model), torch.randint(11, (4, 8))

    def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    asked = {
        "devices": ["cpu:0", "cpu:1"],
        "constraints": Constraints(contiguous=True, min_devices=2),
        "chunks": 2,
    }
    with logical_devices(2):
        with pytest.raises(InfeasibleError):
            placer.suggest(model, tokens[:2], **asked)
        placement = placer.suggest(model, tokens[:2], split_tied=True, **asked)
        assert placement.layer_devices["token_embedding"] != placement.layer_devices["head"]
        flow = DataFlow(model)
        flow.update_flow(placement)
        step = flow.train_step(loss_fn, torch.optim.SGD(model.parameters(), lr=0.1))
        losses = [float(step(tokens, tokens)) for _ in range(3)]
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for loss in losses:
        optimizer.zero_grad()
        expected = loss_fn(reference(tokens), tokens)
        expected.backward()
        optimizer.step()
        assert loss == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.covering
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_profile_tells_what_layers_share(training: bool, frozen: bool) -> None:
    model = gpt(layers=2, width=16, heads=2, context=8, vocabulary=11, tied=True).train(training)
    weight = model.token_embedding.weight.requires_grad_(not frozen)
    found = placer.profile(
        model, torch.randint(11, (2, 8)), devices=["cpu:0"], training=training, cache=False
    )
    gradient = weight.nbytes if training and not frozen else 0
    assert found.tied == (
        TiedParameters(
            layers=("token_embedding", "head"), param_bytes=weight.nbytes, gradient_bytes=gradient
        ),
    )
    assert found.colocated == (("token_embedding", "head"),) and found.untied().colocated == ()


class _Counting(torch.nn.Module):
    """Two calls of a module that also changes a buffer, so that they cannot be on two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.BatchNorm1d(4)
        self.between = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.between(self.inner(x)))  # type: ignore[no-any-return]


def test_layers_that_share_other_state_too_stay_together() -> None:
    found = placer.profile(
        _Counting().train(), torch.randn(3, 4), devices=["cpu:0"], granularity="fine", cache=False
    )
    assert found.colocated == (("inner", "inner@1"),) and found.tied == ()
    assert found.untied().colocated == (("inner", "inner@1"),)


class _Tied(torch.nn.Module):
    """An embedding and a head that share a weight, and a number that torch.export refuses if
    ``hooks``."""

    def __init__(self, hooks: bool = False) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.body = torch.nn.Linear(6, 6)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.hooks = hooks

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        if self.hooks:
            x = x + float(x.detach().sum() * 0)
        return self.head(torch.tanh(self.body(x)))  # type: ignore[no-any-return]


@pytest.mark.covering
@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("how", ["call", "chunks", "stream", "applied"])
def test_split_ties_give_in_inference_what_the_unsplit_model_gives(how: str, hooks: bool) -> None:
    torch.manual_seed(0)
    model = _Tied(hooks).double().eval()
    reference, tokens = copy.deepcopy(model), [torch.randint(11, (4, 3)) for _ in range(4)]
    with logical_devices(2), torch.no_grad():
        placement = placer.suggest(
            model,
            tokens[0],
            devices=["cpu:0", "cpu:1"],
            training=False,
            granularity="submodule",
            split_tied=True,
            progress=False,
            cache=False,
            constraints=Constraints(pinned={"embed": "cpu:0", "head": "cpu:1"}),
        )
        assert placement.contiguous
        flow = DataFlow(model)
        flow.update_flow(placement)
        for turn in range(2):
            if how == "stream":
                found = list(flow.stream(tokens))
            elif how == "applied":
                with flow.applied():
                    found = [model(batch) for batch in tokens]
            else:
                found = [flow(batch, chunks=2 if how == "chunks" else 1) for batch in tokens]
            # where few calls run through hooks rather than be captured
            if how != "applied":
                assert bool(flow.not_captured_because) == hooks
            for one, batch in zip(found, tokens, strict=True):
                torch.testing.assert_close(one.cpu(), reference(batch))
            for net in (model, reference):  # the copy follows its original
                net.embed.weight.mul_(1.5)
            assert turn or flow.module.head.weight is flow.module.embed.weight


def test_a_call_in_inference_moves_a_split_weight_once() -> None:
    model = _Tied().eval()
    flow = DataFlow(model, device_ids=["cpu:0", "cpu:1"])
    flow.layer_gpus.update(embed=0, body=1, head=1)
    with logical_devices(2), torch.no_grad():
        flow.update_flow()
        copies: list[Tensor] = []
        for _ in range(3):
            flow(torch.randint(11, (4, 3)), chunks=2)
            copies.append(flow.copies.get(model.embed.weight, torch.device("cpu", 1)).tensor)
        assert copies[0] is copies[2]
        assert flow.copies.get(model.embed.weight, torch.device("cpu", 1)).is_current
