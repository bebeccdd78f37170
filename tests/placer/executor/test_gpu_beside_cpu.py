"""On one real GPU and the CPU beside it, as a model runs that one card cannot hold: passes,
training steps, streams."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from gpu_cases import training_case, without_dropout
from model_list import LANGUAGE, SMALL, Case, converted
from splitting import assert_same, step, twins
from torch import nn

from placer import DataFlow
from placer.capture.layers import named_state
from placer.executor.training.training_pipeline import Order

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact")]

PLACES = ("cuda:0", "cpu:0")
CHUNKS = 4

SINGLE = ("Llama", "Mixtral", "T5")
"""These normalise in float32 whatever their dtype, which CPU and GPU do in different orders."""


def _scattered(model: nn.Module, how: str, **options: Any) -> DataFlow:
    """The model on both, in halves, the GPU or the CPU first, or at random."""
    flow = DataFlow(model, device_ids=PLACES, **options)
    names, draw = list(flow.layer_gpus), random.Random(how)
    for index, name in enumerate(names):
        half = 2 * index // len(names)
        flow.layer_gpus[name] = {
            "gpu first": PLACES[half],
            "cpu first": PLACES[1 - half],
        }.get(how, draw.choice(PLACES))
    flow.update_flow()
    return flow


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    "case", [case for case in (*SMALL, *LANGUAGE) if "lstm" not in case.name], ids=str
)
def test_split_equals_unsplit(case: Case, training: bool) -> None:
    model, reference = twins(lambda: without_dropout(case.make()), training)
    args, kwargs = converted(case.inputs(training), torch.float64)
    whole = step(reference, reference, args, kwargs)
    initial = {name: tensor.detach().clone() for name, tensor in named_state(model).items()}
    for how in ("one", "two"):
        flow = _scattered(model, how, fine_grained=True)
        split = step(flow, model, args, kwargs)
        flow.undo()
        with torch.no_grad():
            for name, tensor in named_state(model).items():
                tensor.copy_(initial[name])
        within = 1e-5 if case.name.startswith(SINGLE) else 1e-8
        assert_same(split, whole, atol=within, rtol=10 * within)


NAMES = pytest.mark.parametrize("name", ["resnet18", "unet", "tied gpt"])
MAPS = pytest.mark.parametrize("how", ["gpu first", "cpu first", "in turn"])


@pytest.mark.parametrize("schedule", ["1f1b", "fill-drain", "zero-bubble"])
@MAPS
@NAMES
def test_three_steps_equal_the_unsplit_models(name: str, how: str, schedule: Order) -> None:
    model, inputs, target, loss_fn = training_case(name, 8)
    whole = copy.deepcopy(model)
    ours = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    theirs = torch.optim.SGD(whole.parameters(), lr=0.01, momentum=0.9)
    step = _scattered(model, how).train_step(loss_fn, ours, schedule)
    for _ in range(3):
        loss = step(inputs, target, chunks=CHUNKS)
        expected = torch.zeros((), dtype=torch.float64)
        theirs.zero_grad()
        for part, goal in zip(inputs.chunk(CHUNKS), target.chunk(CHUNKS), strict=True):
            term = loss_fn(whole(part), goal) / CHUNKS
            term.backward()
            expected += term.detach()
        theirs.step()
        torch.testing.assert_close(loss.cpu(), expected, atol=1e-8, rtol=1e-8)
    for key, value in whole.state_dict().items():
        torch.testing.assert_close(
            model.state_dict()[key].cpu(), value, atol=1e-7, rtol=1e-7, msg=key
        )


@MAPS
@NAMES
def test_streams_and_calls_in_micro_batches_equal_the_unsplit_model(name: str, how: str) -> None:
    model, inputs, _, _ = training_case(name, 8)
    whole = copy.deepcopy(model).eval()
    flow = _scattered(model.eval(), how)
    with torch.no_grad():
        batches = list(inputs.chunk(CHUNKS)) * 3
        expected = [whole(batch) for batch in batches]
        for where in PLACES:
            given = [batch.to(where) for batch in batches]
            for one, other in zip(flow.stream(given), expected, strict=True):
                torch.testing.assert_close(one.cpu(), other, atol=1e-8, rtol=1e-8)
            whole_batch = flow(torch.cat(given), chunks=CHUNKS)
            torch.testing.assert_close(whole_batch.cpu(), torch.cat(expected), atol=1e-8, rtol=1e-8)


@NAMES
def test_clones_are_on_both(name: str) -> None:
    model, inputs, _, _ = training_case(name, 8)
    whole = copy.deepcopy(model).eval()
    flow = _scattered(model.eval(), "gpu first", enable_clone=True)
    with torch.no_grad():
        expected = whole(inputs)
        for turn in range(4):
            for index, layer in enumerate(flow.layer_gpus):
                flow.layer_gpus[layer] = PLACES[(index + turn) % 2]
            flow.update_flow()
            torch.testing.assert_close(flow(inputs).cpu(), expected, atol=1e-8, rtol=1e-8)
