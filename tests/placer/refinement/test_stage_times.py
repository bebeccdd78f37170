"""Stages measured as the executor runs them, by a clock that counts floating-point operations
instead of time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from refined import (
    PLACES,
    TOKENS,
    device_kind,
    flops,
    flops_clock,
    placed,
    refined_by_flops,
    small_gpt,
    token_loss,
)
from small_models import Branching
from torch import Tensor, nn

import placer
from placer import PlacementRequest
from placer.errors import InputError, ProfilingError
from placer.schema import Constraints

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_stages_of_an_inference_do_together_what_the_model_does() -> None:
    model = small_gpt()
    found = refined_by_flops(model, TOKENS, training=False, rounds=1)
    measured = sum(stage.forward_ms for stage in found.rounds[0].stages)
    assert measured == flops(lambda: model.eval()(TOKENS))
    assert sum(
        layer.forward_ms[device_kind(found)] for layer in found.profile.layers
    ) == pytest.approx(measured)


def test_the_stages_of_a_training_step_do_together_what_the_model_does() -> None:
    model = small_gpt()
    found = refined_by_flops(
        model, TOKENS, training=True, rounds=1, loss_fn=token_loss, target=TOKENS
    )
    forward = sum(stage.forward_ms for stage in found.rounds[0].stages)
    backward = sum(stage.backward_ms for stage in found.rounds[0].stages)
    model.zero_grad()
    assert forward == flops(lambda: model(TOKENS))
    loss = token_loss(model(TOKENS), TOKENS)
    assert backward == flops(lambda: loss.backward())  # type: ignore[no-untyped-call]
    kind = device_kind(found)
    assert sum(layer.backward_ms[kind] for layer in found.profile.layers) == pytest.approx(backward)


@pytest.mark.exhaustive
@pytest.mark.parametrize("training", [True, False])
def test_stages_are_measured_compiled_where_that_is_asked_for(training: bool) -> None:
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    def clock(
        passes: Sequence[Callable[[], None]], device: torch.device, repeats: int
    ) -> list[float]:
        for run in passes:
            run()
        return [1.0] * len(passes)

    model = small_gpt()
    found, placement = placed(model, TOKENS, training)
    given = {"profile": found, "timer": clock, "rounds": 1} | (
        {"loss_fn": token_loss, "target": TOKENS} if training else {}
    )
    for stage in placer.refine(placement, model, TOKENS, **given).rounds[0].stages:
        assert not compiled and not stage.compiled and not stage.not_compiled_because
    stages = placer.refine(placement, model, TOKENS, compile=backend, **given).rounds[0].stages
    assert len(compiled) >= len(stages) >= len({*placement.layer_devices.values()})
    # which is faster is chance here; of the last, the loss may be compiled and the segment not
    for stage in stages:
        whole = bool(stage.compiled) and not stage.compiled.startswith("the loss alone")
        assert whole != bool(stage.not_compiled_because)
    assert [layer for stage in stages for layer in stage.layers] == list(placement.layer_devices)


def test_a_loss_that_works_hard_is_seen_and_given_to_the_last_layer() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    matrix = torch.randn(16, 512)

    def hard(output: Tensor, target: Tensor) -> Tensor:
        return (output @ matrix).square().mean()

    x = torch.randn(8, 16)
    found = refined_by_flops(model, x, training=True, rounds=1, loss_fn=hard, target=x)
    last = found.rounds[0].stages[-1]
    product = 2 * 8 * 16 * 512
    assert (last.loss_forward_ms, last.loss_backward_ms) == (product, product)
    kind = device_kind(found)
    *others, feeds = [layer.forward_ms[kind] for layer in found.profile.layers]
    assert sum(others) + feeds == pytest.approx(4 * 2 * 8 * 16 * 16 + product)
    assert feeds > product


def test_the_halves_of_a_backward_pass_are_measured_where_the_schedule_has_them() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    x = torch.randn(8, 16)
    found = placer.profile(model, x, PLACES, training=True, progress=False, repeats=1)
    halves = {layer.name: PLACES[i // 2] for i, layer in enumerate(found.layers)}
    request = PlacementRequest(
        profile=found, chunks=2, schedule="zero-bubble", constraints=Constraints(pinned=halves)
    )
    refined = placer.refine(
        placer.solve(request), model, x, request=request, rounds=1, timer=flops_clock
    )
    # what one product of matrices takes; the first layer has no gradient to hand on
    one = 2 * 8 * 16 * 16
    assert [stage.weight_grad_ms for stage in refined.rounds[0].stages] == [2 * one, 2 * one]
    assert [stage.backward_ms for stage in refined.rounds[0].stages] == [3 * one, 4 * one]


@pytest.mark.exhaustive
def test_what_runs_forwards_twice_is_measured_as_it_is_reckoned_once() -> None:
    """The second pass forwards is the placement's, not the layers': the solver adds it, and so it
    did twice."""
    model = small_gpt()
    found = placer.profile(model, TOKENS, PLACES, training=True, progress=False, repeats=1)
    request = PlacementRequest(profile=found, constraints=Constraints(recompute="always"))
    placement = placer.solve(request)
    asked = {
        "request": request,
        "rounds": 1,
        "timer": flops_clock,
        "loss_fn": token_loss,
        "target": TOKENS,
    }
    refined = placer.refine(placement, model, TOKENS, **asked)
    assert placement.recompute
    loss = token_loss(model(TOKENS), TOKENS)
    backward = flops(lambda: loss.backward())  # type: ignore[no-untyped-call]
    assert sum(stage.backward_ms for stage in refined.rounds[0].stages) == backward


def test_refining_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    model(x).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [parameter.grad for parameter in model.parameters()]
    values = [gradient.clone() for gradient in gradients if gradient is not None]
    model[1].eval()
    state = torch.get_rng_state()
    refined_by_flops(model, x, training=True, rounds=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model] == [True, False, True, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for parameter, gradient, value in zip(model.parameters(), gradients, values, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(parameter.grad, value)


def test_without_a_clock_of_ones_own_the_hosts_is_used() -> None:
    model, x = small_gpt(), TOKENS
    found, placement = placed(model, x, training=True)
    refined = placer.refine(placement, model, x, profile=found, rounds=1, repeats=1)
    assert all(stage.forward_ms > 0 and stage.backward_ms > 0 for stage in refined.rounds[0].stages)


def test_inputs_that_the_model_fails_on_are_refused_as_such() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    found, placement = placed(model, torch.randn(2, 4), training=False)
    with pytest.raises(
        InputError, match=r"the model fails on the example inputs: .*shapes cannot be multiplied"
    ):
        placer.refine(placement, model, torch.randn(2, 5), profile=found)


def test_a_model_that_runs_through_hooks_is_refused_with_the_reason() -> None:
    for training in (True, False):
        with pytest.raises(ProfilingError, match="Branching runs through hooks"):
            refined_by_flops(Branching(), torch.randn(4, 8), training=training)
