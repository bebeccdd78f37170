"""The gradients of a pass are added many at a time, and are what autograd adds one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from placer import DataFlow
from placer.executor.training.optimizer import gradient_accumulation
from placer.executor.training.optimizer.gradient_accumulation import Accumulation
from placer.testing import logical_devices

LAYERS, PASSES = 4, 3


class _Operations(TorchDispatchMode):
    """Notes what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(3, 3) for _ in range(LAYERS)), nn.Embedding(5, 2, sparse=True)
    ).double()
    model[1].weight = model[0].weight
    with torch.no_grad():
        # its gradient comes in another order of memory
        model[2].weight.set_(model[2].weight.t())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model


def _backward(model: nn.Module, x: Tensor) -> None:
    *chain, table = model.children()
    for layer in chain:
        x = layer(x)
    (x.sum() + table(torch.tensor([1, 1, 4])).sum()).backward()  # type: ignore[no-untyped-call]


def _gradients(model: nn.Module) -> list[Tensor | None]:
    return [
        None if parameter.grad is None else parameter.grad.to_dense()
        for parameter in model.parameters()
    ]


@pytest.mark.parametrize("most_bytes", [2**20, 50, 0])
def test_sums_are_those_of_autograd_and_stay_in_place(
    most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_accumulation, "_MOST_BYTES", most_bytes)
    ours, theirs = _model(), _model()
    places = [id(parameter.grad) for parameter in ours.parameters()]
    together = Accumulation(ours.parameters())
    for _ in range(PASSES):
        x = torch.randn(6, 3, dtype=torch.float64)
        with together:
            _backward(ours, x)
        _backward(theirs, x)
    for own, other in zip(_gradients(ours), _gradients(theirs), strict=True):
        torch.testing.assert_close(own, other)
    assert [id(parameter.grad) for parameter in ours.parameters()] == places


def test_many_gradients_are_added_at_once() -> None:
    model = _model()
    together = Accumulation(model.parameters())
    with _Operations() as operations, together:
        _backward(model, torch.randn(6, 3, dtype=torch.float64))
    assert operations.names.count("aten::_foreach_add_.List") == 1


def test_after_a_pass_that_fails_sums_are_in_place_and_later_passes_add_their_own_alone() -> None:
    model, reference = _model(), _model()
    together = Accumulation(model.parameters())
    before = [parameter.grad for parameter in model.parameters()]
    with pytest.raises(RuntimeError, match="half way"), together:
        _backward(model, torch.randn(6, 3, dtype=torch.float64))
        raise RuntimeError("half way")
    assert all(
        parameter.grad is sum_ for parameter, sum_ in zip(model.parameters(), before, strict=True)
    )
    model.zero_grad(set_to_none=False)
    x = torch.randn(6, 3, dtype=torch.float64)
    with together:
        _backward(model, x)
    _backward(reference, x)
    torch.testing.assert_close(_gradients(model), _gradients(reference))


def test_outside_of_it_autograd_adds_as_ever() -> None:
    model, reference = _model(), _model()
    Accumulation(model.parameters())
    x = torch.randn(6, 3, dtype=torch.float64)
    _backward(model, x)
    _backward(reference, x)
    torch.testing.assert_close(_gradients(model), _gradients(reference))


def test_hooks_go_with_what_set_them() -> None:
    model = _model()
    accumulation = Accumulation(model.parameters())
    weight = model[0].weight
    assert len(weight._post_accumulate_grad_hooks) == 1
    del accumulation
    assert len(weight._post_accumulate_grad_hooks) == 0


def test_batches_of_ever_new_sizes_leave_no_hooks_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every backward pass would call them, so that steps would take longer and longer."""
    handles = []
    register = Tensor.register_post_accumulate_grad_hook

    def noted(self: Tensor, hook: Any) -> Any:
        handles.append(register(self, hook))
        return handles[-1]

    monkeypatch.setattr(Tensor, "register_post_accumulate_grad_hook", noted)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with logical_devices(2):
        flow = DataFlow(model, 2, fine_grained=True)
        flow.layer_gpus.update({"0": 0, "1": 1})
        flow.update_flow()
        step = flow.train_step(nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
        counts = []
        for size in range(2, 42):
            step(torch.ones(size, 3), torch.ones(size, 3), chunks=2)
            counts.append(sum(one.id in (one.hooks_dict_ref() or {}) for one in handles))
    assert len(handles) > 100
    assert counts[-1] == counts[19]
