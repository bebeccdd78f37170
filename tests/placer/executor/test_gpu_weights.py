"""On real GPUs: weights that consist of several tensors move completely."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from placed_weights import adapted, assert_on
from quantised_kinds import QUANTISED
from torch import nn
from weight_kinds import KINDS, Kind, batch_of, model_of

from placer import DataFlow
from placer.profiler.profile import profile

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact")]
SAMPLES = 54
"""Three micro-batches of 18: products of 8-bit numbers on a GPU need more than 16 rows."""
CLOSE = {"atol": 1e-5, "rtol": 1e-4}


def _kinds() -> dict[str, Kind]:
    """Return the kinds whose libraries are installed, without those for calls on a CPU."""
    missing = [name for name in ("torchao", "bitsandbytes") if find_spec(name) is None]
    return KINDS | {
        name: kind
        for name, kind in QUANTISED.items()
        if "packed" not in name and name.split()[0] not in missing
    }


ALL = _kinds()
PLACES = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def _placed(model: nn.Module) -> DataFlow:
    flow = DataFlow(model, device_ids=PLACES)
    flow.layer_gpus.update({"0": 0, "1": 0, "2": len(PLACES) - 1})
    flow.update_flow()
    return flow


@pytest.mark.parametrize("kind", ALL)
def test_a_placed_model_gives_what_the_unsplit_model_gives_and_comes_back(kind: str) -> None:
    model, x = model_of(ALL[kind]), batch_of(ALL[kind], SAMPLES)
    layers: list[Any] = [model[0], model[2]]
    before = [[tensor.detach().clone() for tensor in ALL[kind].stored(layer)] for layer in layers]
    with torch.no_grad():
        flow = _placed(model)
        for layer, place in zip(layers, (PLACES[0], PLACES[-1]), strict=True):
            assert_on(ALL[kind].stored(layer), place)
            assert all(parameter.device == place for parameter in layer.parameters())
        found = [flow(x), flow(x, chunks=3), *flow.stream([x, x]), flow(x)]
        flow.undo()
        for layer, values in zip(layers, before, strict=True):
            assert_on(ALL[kind].stored(layer), torch.device("cpu"))
            for tensor, value in zip(ALL[kind].stored(layer), values, strict=True):
                assert torch.equal(tensor, value)
        one = DataFlow(model, device_ids=PLACES[:1])
        one.update_flow()  # the unsplit model, with kernels of a GPU
        expected = model(x.to(PLACES[0])).cpu()
    for result in found:
        torch.testing.assert_close(result.cpu(), expected, **CLOSE)


@pytest.mark.parametrize("kind", ALL)
def test_layers_are_measured_on_a_gpu(kind: str) -> None:
    found = profile(
        model_of(ALL[kind]),
        batch_of(ALL[kind], SAMPLES),
        PLACES[:1],
        training=False,
        cache=False,
        progress=False,
    )
    assert all(
        time > 0
        for layer in (found.layers[0], found.layers[-1])
        for time in layer.forward_ms.values()
    )


@pytest.mark.parametrize("kind", ALL)
def test_adapters_train_as_in_the_unsplit_model(kind: str) -> None:
    model = adapted(ALL[kind])
    reference = adapted(ALL[kind])
    x = batch_of(ALL[kind], SAMPLES)
    train = _placed(model).train_step(nn.functional.mse_loss)
    for _ in range(2):
        train(x, x, chunks=2)
    one = DataFlow(reference, device_ids=PLACES[:1])
    one.update_flow()
    nn.functional.mse_loss(reference(x.to(PLACES[0])), x.to(PLACES[0])).backward()
    for (name, mine), its in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (mine.grad is None) == (its.grad is None), name
        if mine.grad is not None and its.grad is not None:
            torch.testing.assert_close(mine.grad.cpu(), its.grad.cpu(), **CLOSE, msg=name)
