"""A stream gives for every batch what the unsplit model gives, in order, with several batches on
their way at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_list import CASES, Case, converted
from small_models import TiedTokens
from splitting import scatter_layers, twins
from streams import ROW, assert_close, placed, skips, unsplit
from torch import Tensor, nn

from placer import DataFlow
from placer.testing import logical_devices
from placer.zoo import resnet18

MODELS = ("toy", "unet", "T5ForConditionalGeneration", "lstm_stacked", "zoo_resnet18", "gpt")


def _batches(case: Case, count: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Unlike batches of one shape."""
    return [converted(case.inputs(False), torch.float64) for _ in range(count)]


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kwargs if kwargs else args


@pytest.mark.covering(every=4, first=1)
@pytest.mark.parametrize("name", MODELS)
def test_every_batch_gives_what_the_unsplit_model_gives(name: str) -> None:
    model, whole = twins(CASES[name].make, training=False)
    batches = _batches(CASES[name], 4)
    with logical_devices(4):
        flow = DataFlow(model, fine_grained=True)
        scatter_layers(flow, 4, seed=1)
        results = list(flow.stream(_given(*batch) for batch in batches))
    assert len(results) == len(batches)
    with torch.no_grad():
        for result, (args, kwargs) in zip(results, batches, strict=True):
            assert_close(result, whole(*args, **kwargs))


def test_shapes_may_change_from_batch_to_batch() -> None:
    model, _ = skips()
    batches = [torch.randn(rows, ROW, dtype=torch.float64) for rows in (4, 4, 2, 4, 3, 3, 3, 1, 4)]
    expected = unsplit(model, batches)
    with logical_devices(3):
        results = list(placed(model).stream(batches))
    assert_close(results, expected)


def test_more_shapes_than_are_kept_still_give_what_the_unsplit_model_gives() -> None:
    model, _ = skips()
    batches = [
        torch.randn(rows, ROW, dtype=torch.float64) for rows in range(2, 14) for _ in range(2)
    ]
    expected = unsplit(model, batches)
    with logical_devices(3):
        flow = placed(model)
        results = list(flow.stream(batches))
        assert len(flow.calls.streams._pipelines) < 12
    assert_close(results, expected)


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(ROW, ROW), nn.Linear(ROW, ROW)

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> dict[str, Tensor]:
        hidden = torch.tanh(self.one(x))
        return {
            "hidden": hidden,
            "given": x,
            "out": self.two(hidden if scale is None else hidden * scale),
        }


def test_batches_may_be_tensors_tuples_lists_and_dicts() -> None:
    model, whole = twins(_Pair, training=False)
    x, scale = torch.randn(4, ROW, dtype=torch.float64), torch.randn(ROW, dtype=torch.float64)
    with logical_devices(2):
        flow = placed(model, 2)
        results = list(flow.stream([x, (x,), [x], {"x": x, "scale": scale}] * 2))
    with torch.no_grad():
        expected = [whole(x), whole(x), whole(x), whole(x=x, scale=scale)] * 2
    assert_close(results, expected)


def test_results_are_on_the_output_device() -> None:
    model, _ = twins(_Pair, training=False)
    with logical_devices(2) as places:
        flow = placed(model, 2, output_device="cpu:1")
        for result in flow.stream([torch.randn(2, ROW, dtype=torch.float64) for _ in range(4)]):
            assert {tensor.device for tensor in result.values()} == {places[1]}


def test_no_gradients_are_kept_and_the_callers_mode_stays() -> None:
    model, batches = skips()
    with logical_devices(3):
        for result in placed(model).stream(batches):
            assert torch.is_grad_enabled()
            assert not result.requires_grad


def test_a_stream_may_run_under_inference_mode_and_the_next_outside_of_it() -> None:
    model, batches = skips()
    with logical_devices(3):
        flow = placed(model)
        with torch.inference_mode():
            inside = list(flow.stream(batches))
        assert_close(inside, unsplit(model, batches))
        assert_close(list(flow.stream(batches)), unsplit(model, batches))


def test_layers_run_under_the_autocast_of_the_caller() -> None:
    model, batches = skips()
    model, batches = model.float(), [batch.float() for batch in batches]
    with logical_devices(3):
        flow = placed(model)
        plain = list(flow.stream(batches))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = list(flow.stream(batches))
            expected = [flow(batch).detach() for batch in batches]
    assert any(not torch.equal(one, other) for one, other in zip(plain, half, strict=True))
    assert_close(half, expected)


def test_weights_that_were_changed_between_streams_are_used() -> None:
    model, batches = skips()
    with logical_devices(3):
        flow = placed(model)
        list(flow.stream(batches))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        assert_close(list(flow.stream(batches)), unsplit(model, batches))
        for parameter in model.parameters():
            parameter.data = parameter.data * 3  # another storage
        assert_close(list(flow.stream(batches)), unsplit(model, batches))


def test_a_tied_weight_that_was_changed_is_changed_on_every_device() -> None:
    model, whole = twins(TiedTokens, training=False)
    batches = [torch.randint(0, 7, (2, 3)) for _ in range(4)]
    with logical_devices(3):
        flow = placed(model)
        for _ in range(2):
            results = list(flow.stream(batches))
            with torch.no_grad():
                assert_close(results, [whole(batch) for batch in batches])
                model.embedding.weight.mul_(2)
                whole.embedding.weight.mul_(2)


def test_a_tied_weight_that_a_fused_optimizer_steps_is_changed_on_every_device() -> None:
    # Torch does not count what the kernel of its step writes.
    model, whole = twins(TiedTokens, training=False)
    batches = [torch.randint(0, 7, (2, 3)) for _ in range(4)]
    with logical_devices(3):
        flow = placed(model)
        optimizers = [
            torch.optim.AdamW(each.parameters(), lr=0.1, fused=True) for each in (model, whole)
        ]
        for _ in range(3):
            results = list(flow.stream(batches))
            with torch.no_grad():
                assert_close(results, [whole(batch) for batch in batches])
            for each, optimizer in zip((model, whole), optimizers, strict=True):
                for parameter in each.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()


def test_clones_stream_too() -> None:
    model, batches = skips()
    with logical_devices(3):
        flow = DataFlow(model, fine_grained=True, inference_only=True, enable_clone=True)
        for seed in range(2):
            scatter_layers(flow, 3, seed)
            assert_close(list(flow.stream(batches)), unsplit(model, batches))
        with torch.no_grad():
            next(model.parameters()).add_(1.0)
        assert_close(list(flow.stream(batches)), unsplit(model, batches))


@pytest.mark.exhaustive
def test_in_training_mode_running_statistics_are_those_of_one_batch_after_another() -> None:
    model, whole = twins(resnet18)
    batches = [torch.randn(4, 3, 32, 32, dtype=torch.float64) for _ in range(4)]
    with logical_devices(3):
        results = list(placed(model).stream(batches))
    with torch.no_grad():
        assert_close(results, [whole(batch) for batch in batches])
    for name, buffer in whole.named_buffers():
        torch.testing.assert_close(dict(model.named_buffers())[name].cpu(), buffer, msg=name)


class _Branching(nn.Module):
    """A branch on a tensor's value: it cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(ROW, ROW), nn.Linear(ROW, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        return self.two(x if x.sum() > 0 else -x)


def test_a_model_that_cannot_be_captured_runs_batch_after_batch() -> None:
    model, whole = twins(_Branching, training=False)
    batches = [torch.randn(4, ROW, dtype=torch.float64) for _ in range(5)]
    with logical_devices(2) as places:
        flow = placed(model, 2)
        results = list(flow.stream(batches))
        assert all(result.device == places[0] for result in results)
        assert flow.not_captured_because
    with torch.no_grad():
        assert_close(results, [whole(batch) for batch in batches])


def test_before_the_first_map_the_model_runs_as_it_is() -> None:
    model, batches = skips()
    assert_close(list(DataFlow(model).stream(batches)), unsplit(model, batches))


def test_an_empty_source_gives_nothing() -> None:
    model, _ = skips()
    with logical_devices(3):
        assert list(placed(model).stream([])) == []
