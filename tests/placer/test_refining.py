"""Stages measured as the executor runs them, by a clock that counts floating-point operations instead of time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from small_models import Branching
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import placer
from placer import Placement, PlacementRequest, Profile, zoo
from placer.errors import InputError, ProfilingError
from placer.schema import Constraints
from placer.testing import logical_devices

PLACES = ["cpu:0", "cpu:1"]
TOKENS = torch.arange(32).reshape(2, 16)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _flops(run: Callable[[], Any]) -> float:
    # The counter does not know the product that adds in place, which is how weight gradients are made apart.
    in_place = {torch.ops.aten.addmm_: lambda _, a, b, **rest: 2 * a[0] * a[1] * b[1]}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        run()
    return float(counter.get_total_flops())


def flops_clock(passes: Sequence[Callable[[], None]], device: torch.device, repeats: int) -> list[float]:
    return [_flops(run) for run in passes]


def _gpt() -> nn.Module:
    return zoo.gpt(layers=3, width=32, heads=2, context=16, vocabulary=50)


def _placed(model: nn.Module, x: Any, training: bool) -> tuple[Profile, Placement]:
    return _placed_gpt(training) if x is TOKENS else _placed_now(model, x, training)


@cache
def _placed_gpt(training: bool) -> tuple[Profile, Placement]:
    """Those of every ``_gpt()``."""
    return _placed_now(_gpt(), TOKENS, training)


def _placed_now(model: nn.Module, x: Any, training: bool) -> tuple[Profile, Placement]:
    found = placer.profile(model, x, PLACES, training=training, progress=False, repeats=1)
    return found, placer.solve(PlacementRequest(profile=found, chunks=2))


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def _refined(model: nn.Module, x: Any, training: bool, **options: Any) -> placer.Refinement:
    found, placement = _placed(model, x, training)
    return placer.refine(placement, model, x, profile=found, timer=flops_clock, **options)


def test_the_stages_of_an_inference_do_together_what_the_model_does() -> None:
    model = _gpt()
    found = _refined(model, TOKENS, training=False, rounds=1)
    measured = sum(stage.forward_ms for stage in found.rounds[0].stages)
    assert measured == _flops(lambda: model.eval()(TOKENS))
    assert sum(layer.forward_ms[_kind(found)] for layer in found.profile.layers) == pytest.approx(measured)


def test_the_stages_of_a_training_step_do_together_what_the_model_does() -> None:
    model = _gpt()
    found = _refined(model, TOKENS, training=True, rounds=1, loss_fn=_loss, target=TOKENS)
    forward = sum(stage.forward_ms for stage in found.rounds[0].stages)
    backward = sum(stage.backward_ms for stage in found.rounds[0].stages)
    model.zero_grad()
    assert forward == _flops(lambda: model(TOKENS))
    loss = _loss(model(TOKENS), TOKENS)
    assert backward == _flops(lambda: loss.backward())  # type: ignore[no-untyped-call]
    kind = _kind(found)
    assert sum(layer.backward_ms[kind] for layer in found.profile.layers) == pytest.approx(backward)


@pytest.mark.parametrize("training", [True, False])
def test_stages_are_measured_compiled_where_that_is_asked_for(training: bool) -> None:
    compiled = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        compiled.append(graph)
        return graph.forward

    def clock(passes: Sequence[Callable[[], None]], device: torch.device, repeats: int) -> list[float]:
        for run in passes:
            run()
        return [1.0] * len(passes)

    model = _gpt()
    found, placement = _placed(model, TOKENS, training)
    given = {"profile": found, "timer": clock, "rounds": 1} | ({"loss_fn": _loss, "target": TOKENS} if training else {})
    for stage in placer.refine(placement, model, TOKENS, **given).rounds[0].stages:
        assert not compiled and not stage.compiled and not stage.not_compiled_because
    stages = placer.refine(placement, model, TOKENS, compile=backend, **given).rounds[0].stages
    assert len(compiled) >= len(stages) >= len({*placement.layer_devices.values()})
    for stage in stages:  # which is faster is chance here; of the last, the loss may be compiled and the segment not
        whole = bool(stage.compiled) and not stage.compiled.startswith("the loss alone")
        assert whole != bool(stage.not_compiled_because)
    assert [layer for stage in stages for layer in stage.layers] == list(placement.layer_devices)


def test_an_unknown_compiler_is_refused() -> None:
    model = _gpt()
    with pytest.raises(InputError, match="is no backend of"):
        _refined(model, TOKENS, training=True, compile="inductr")


def test_a_loss_that_works_hard_is_seen_and_given_to_the_last_layer() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    matrix = torch.randn(16, 512)

    def hard(output: Tensor, target: Tensor) -> Tensor:
        return (output @ matrix).square().mean()

    x = torch.randn(8, 16)
    found = _refined(model, x, training=True, rounds=1, loss_fn=hard, target=x)
    last = found.rounds[0].stages[-1]
    product = 2 * 8 * 16 * 512
    assert (last.loss_forward_ms, last.loss_backward_ms) == (product, product)
    kind = _kind(found)
    *others, feeds = [layer.forward_ms[kind] for layer in found.profile.layers]
    assert sum(others) + feeds == pytest.approx(4 * 2 * 8 * 16 * 16 + product)
    assert feeds > product


def test_the_halves_of_a_backward_pass_are_measured_where_the_schedule_has_them() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    x = torch.randn(8, 16)
    found = placer.profile(model, x, PLACES, training=True, progress=False, repeats=1)
    halves = {layer.name: PLACES[i // 2] for i, layer in enumerate(found.layers)}
    request = PlacementRequest(profile=found, chunks=2, schedule="zero-bubble", constraints=Constraints(pinned=halves))
    refined = placer.refine(placer.solve(request), model, x, request=request, rounds=1, timer=flops_clock)
    one = 2 * 8 * 16 * 16  # what one product of matrices takes; the first layer has no gradient to hand on
    assert [stage.weights_ms for stage in refined.rounds[0].stages] == [2 * one, 2 * one]
    assert [stage.backward_ms for stage in refined.rounds[0].stages] == [3 * one, 4 * one]


def test_what_runs_forwards_twice_is_measured_as_it_is_reckoned_once() -> None:
    """The second pass forwards is the placement's, not the layers': the solver adds it, and so it did twice."""
    model = _gpt()
    found = placer.profile(model, TOKENS, PLACES, training=True, progress=False, repeats=1)
    request = PlacementRequest(profile=found, constraints=Constraints(recompute="always"))
    placement = placer.solve(request)
    asked = {"request": request, "rounds": 1, "timer": flops_clock, "loss_fn": _loss, "target": TOKENS}
    refined = placer.refine(placement, model, TOKENS, **asked)
    assert placement.recompute
    loss = _loss(model(TOKENS), TOKENS)
    backward = _flops(lambda: loss.backward())  # type: ignore[no-untyped-call]
    assert sum(stage.backward_ms for stage in refined.rounds[0].stages) == backward


def test_a_placement_that_recomputes_is_refined_without_its_question() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    x = torch.randn(256, 64)
    found = placer.profile(model, x, PLACES, training=True, progress=False, repeats=1)
    assert found.cluster is not None
    for limit in range(2**18, 2**21, 2**14):
        devices = [device.model_copy(update={"memory_bytes": limit}) for device in found.cluster.devices]
        small = found.model_copy(update={"cluster": found.cluster.model_copy(update={"devices": tuple(devices)})})
        asked = {"chunks": 8, "schedule": "fill-drain", "constraints": Constraints(recompute="auto")}
        placement = placer.solve(PlacementRequest(profile=small, **asked))
        if placement.layer_devices:
            break
    assert placement.recompute
    refined = placer.refine(placement, model, x, profile=small, rounds=1, timer=flops_clock)
    assert refined.placement.recompute


def test_of_several_sizes_of_micro_batches_the_one_that_was_placed_is_corrected() -> None:
    model, x = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2))), torch.randn(4, 8)
    large, small = (
        placer.profile(model, batch, PLACES, training=True, progress=False, repeats=1) for batch in (x, x[:2])
    )
    request = PlacementRequest(profile=large, profiles=(small,), objective="step", batch_size=4, schedule="auto")
    asked = request.model_copy(update={"profile": small, "profiles": ()})
    placement = placer.solve(asked)
    refined = placer.refine(placement, model, x[:2], request=request, rounds=1, timer=flops_clock)
    assert refined.profile.batch_size == refined.placement.batch_size == 2
    assert sum(stage.forward_ms for stage in refined.rounds[0].stages) == _flops(lambda: model(x[:2]))


def test_refining_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    model(x).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [parameter.grad for parameter in model.parameters()]
    values = [gradient.clone() for gradient in gradients if gradient is not None]
    model[1].eval()
    state = torch.get_rng_state()
    _refined(model, x, training=True, rounds=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model] == [True, False, True, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for parameter, gradient, value in zip(model.parameters(), gradients, values, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(parameter.grad, value)


def test_refining_runs_among_logical_devices() -> None:
    with logical_devices(2):
        found = _refined(_gpt(), TOKENS.clone(), training=True, loss_fn=_loss, target=TOKENS)
    assert found.rounds


def test_without_a_clock_of_ones_own_the_hosts_is_used() -> None:
    model, x = _gpt(), TOKENS
    found, placement = _placed(model, x, training=True)
    refined = placer.refine(placement, model, x, profile=found, rounds=1, repeats=1)
    assert all(stage.forward_ms > 0 and stage.backward_ms > 0 for stage in refined.rounds[0].stages)


def test_without_a_profile_one_is_made_of_the_placements_layers() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    _, placement = _placed(model, x, training=False)
    refined = placer.refine(placement, model, x, rounds=1, timer=flops_clock)
    assert [layer.name for layer in refined.profile.layers] == list(placement.layer_devices)


def test_a_refinement_is_json_and_back() -> None:
    found = _refined(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8), training=False)
    assert placer.Refinement.model_validate_json(found.to_json()) == found


def test_a_placement_of_nothing_is_refused() -> None:
    empty = Placement(status="infeasible", objective="throughput")
    with pytest.raises(InputError, match="infeasible and places no layer"):
        placer.refine(empty, nn.Linear(2, 2), torch.randn(2, 2))
    with pytest.raises(InputError, match="placement is a dict; give one that suggest or solve returned"):
        placer.refine(empty.model_dump(), nn.Linear(2, 2), torch.randn(2, 2))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"model": _gpt}, "give an nn.Module"),
        ({"model": nn.Linear}, r"model is the class Linear; give an instance, such as Linear\(\)"),
        ({"profile": "profile.json"}, "profile is a str; give a Profile, which Profile.model_validate_json"),
        ({"request": "request.json"}, "request is a str; give a PlacementRequest"),
        ({"rounds": "3"}, "^rounds is '3'; give a whole number, at least 1"),
        ({"rounds": 0}, "^rounds is 0; give a whole number, at least 1"),
        ({"repeats": 0}, "^repeats is 0; give a whole number, at least 1"),
        ({"target": TOKENS}, "target is given without loss_fn"),
        ({"loss_fn": _loss}, "loss_fn is given without target; give both to have the loss measured, or none"),
        ({"model": zoo.gpt(3, 16, 2, 16, 50)}, r"GPT have \d+ bytes of parameters, those of the profile \d+"),
        ({"loss_fn": nn.CrossEntropyLoss, "target": TOKENS}, r"such as CrossEntropyLoss\(\)"),
        ({"example_inputs": TOKENS[:1]}, "a micro-batch of 1, and the profile is of one of 2"),
        ({"placement": {"layer_devices": {"0": "cpu:0"}}}, "a layer '0', and the profile has none"),
        ({"placement": {"batch_size": 8}}, "the placement is of micro-batches of 8, and the profile is of one of 2"),
    ],
)
def test_what_cannot_be_refined_is_named_and_the_model_left_alone(wrong: dict[str, Any], told: str) -> None:
    model = _gpt()
    found, placement = _placed(model, TOKENS, training=True)
    if wrong.get("placement"):
        wrong = {"placement": placement.model_copy(update=wrong["placement"])}
    given = {"placement": placement, "model": model, "example_inputs": TOKENS, "profile": found, "timer": flops_clock}
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match=told):
        placer.refine(**given | wrong)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_inputs_that_the_model_fails_on_are_refused_as_such() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    found, placement = _placed(model, torch.randn(2, 4), training=False)
    with pytest.raises(InputError, match=r"the model fails on the example inputs: .*shapes cannot be multiplied"):
        placer.refine(placement, model, torch.randn(2, 5), profile=found)


def test_a_model_that_runs_through_hooks_is_refused_with_the_reason() -> None:
    for training in (True, False):
        with pytest.raises(ProfilingError, match="Branching runs through hooks"):
            _refined(Branching(), torch.randn(4, 8), training=training)


def _kind(found: placer.Refinement) -> str:
    (kind,) = found.profile.layers[0].forward_ms
    return kind
