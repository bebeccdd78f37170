"""The peak memory of whole models, as a profile predicts it and as it really was, tensor by tensor."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from placer import zoo
from placer.graph.capture import capture
from placer.profiler.profile import profile
from placer.schema import PlacementRequest
from placer.solver import memory
from placer.solver.problem import Problem

CPU = torch.device("cpu", 0)

MODELS = {
    "resnet18": lambda: (zoo.resnet18(10), torch.randn(4, 3, 32, 32)),
    "unet": lambda: (zoo.unet(width=4), torch.randn(2, 3, 32, 32)),
    "gpt": lambda: (
        zoo.gpt(layers=2, width=32, heads=2, context=16, vocabulary=50, dropout=0.1),
        torch.randint(0, 50, (4, 16)),
    ),
}


class _Peak(TorchDispatchMode):
    """The most bytes of tensors that live at one time, beyond those that were there before."""

    def __init__(self, before: Sequence[Tensor]) -> None:
        super().__init__()
        self._seen = {tensor.untyped_storage()._cdata for tensor in before}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self.held = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return

        def end(_: Any) -> None:
            self.held -= size
            self._seen.discard(key)
            del self._alive[key]

        self._seen.add(key)
        self._alive[key] = weakref.ref(storage, end)
        self.held += size
        self.bytes = max(self.bytes, self.held)


def _state(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_peaks_where_its_profile_says(name: str) -> None:
    model, x = MODELS[name]()
    problem = Problem.from_request(PlacementRequest(profile=profile(model, x, [CPU], progress=False, repeats=1)))
    everything = memory.Held(list(range(len(problem.layers))), list(problem.values))
    use = memory.footprint(problem, everything).one
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    with _Peak([*_state(model), *gradients]) as peak:
        model(x.clone()).mean().backward()  # the loss is no layer, and holds next to nothing
    assert use.activation_bytes + use.workspace_bytes == pytest.approx(peak.bytes, rel=0.005)


@pytest.mark.parametrize(("name", "granularity"), [("resnet18", "auto"), ("unet", "submodule"), ("gpt", "fine")])
def test_an_inference_peaks_where_its_profile_says(
    name: str, granularity: str, predict_inference: Any, run_in_order: Any
) -> None:
    model, x = MODELS[name]()
    predicted = predict_inference(
        profile(model, x, [CPU], training=False, progress=False, repeats=1, granularity=granularity)
    )
    graph = capture(model.eval(), x, granularity=granularity)
    with _Peak([*_state(model), *graph.state.values(), x]) as peak:
        run_in_order(graph, x, CPU)
    assert 0.98 * peak.bytes <= predicted <= 1.1 * peak.bytes
