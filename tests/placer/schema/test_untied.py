"""``Profile.untied``: layers that share parameters may be on several devices, each further one with a copy."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional

import placer
from placer import Constraints, DataFlow, Profile
from placer.errors import InfeasibleError, InputError
from placer.schema import Layer, TiedParameters
from placer.testing import logical_devices
from placer.zoo import gpt


def _layer(name: str, buffer_bytes: int = 0, **own: int) -> Layer:
    return Layer(name=name, forward_ms={"t": 1.0}, backward_ms={"t": 2.0}, buffer_bytes=buffer_bytes, **own)


def _profile(buffer_bytes: int = 0) -> Profile:
    layers = [_layer("embed", param_bytes=100, grad_bytes=100, optimizer_bytes=200), _layer("body", param_bytes=7)]
    layers += [_layer("head", buffer_bytes, param_bytes=3), _layer("again")]
    tie = TiedParameters(layers=("embed", "head", "again"), gradient_bytes=100)
    together = ("embed", "head", "again"), ("body", "again")
    return Profile(layers=layers, colocated=together, tied=[tie], training=True)


def test_each_further_layer_has_a_copy_and_a_gradient_and_no_optimizer_state() -> None:
    given = _profile()
    untied = given.untied()
    held = {layer.name: (layer.param_bytes, layer.grad_bytes, layer.optimizer_bytes) for layer in untied.layers}
    assert held == {"embed": (100, 100, 200), "body": (7, 0, 0), "head": (103, 100, 0), "again": (100, 100, 0)}
    assert untied.colocated == (("body", "again"),) and untied.tied == ()
    assert untied.untied() == untied and given == _profile()


def test_layers_with_buffers_stay_together() -> None:
    assert _profile(buffer_bytes=1).untied() == _profile(buffer_bytes=1)


def test_a_profile_of_inference_does_not_tell_what_layers_share() -> None:
    inference = _profile().model_copy(update={"training": False})
    with pytest.raises(InputError, match=r"of inference, .* leave split_tied out"):
        inference.untied()
    with pytest.raises(InputError, match="of inference"):  # before anything is measured
        placer.suggest(gpt(layers=1), torch.zeros(1, 1024, dtype=torch.long), training=False, split_tied=True)
    with pytest.raises(InputError, match="split_tied is 'no'; give True or False"):
        placer.suggest(profile=_profile(), split_tied="no")  # type: ignore[arg-type]


def test_embeddings_that_are_split_are_cut_like_a_chain_and_train_as_the_unsplit_model_does() -> None:
    torch.manual_seed(0)
    model = gpt(layers=4, width=16, heads=2, context=8, vocabulary=11, tied=True).double()
    reference, tokens = copy.deepcopy(model), torch.randint(11, (4, 8))

    def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    asked = {"devices": ["cpu:0", "cpu:1"], "constraints": Constraints(contiguous=True, min_devices=2), "chunks": 2}
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


def test_the_profile_counts_what_the_devices_then_hold() -> None:
    model = gpt(layers=2, width=16, heads=2, context=8, vocabulary=11, tied=True)
    profile = placer.profile(model, torch.randint(11, (2, 8)), devices=["cpu:0"], cache=False)
    apart, size = profile.untied(), model.token_embedding.weight.nbytes
    more = {
        layer.name: (layer.param_bytes - before.param_bytes, layer.grad_bytes - before.grad_bytes)
        for before, layer in zip(profile.layers, apart.layers, strict=True)
        if layer != before
    }
    assert more == {"head": (size, size)}
