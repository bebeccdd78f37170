"""Passes through hooks, of a flow and of a look: what runs again in backward passes, and what is
left as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from splitting import assert_same, step, twins
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from placer import DataFlow
from placer.capture import capture_graph
from placer.testing import logical_devices

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)


class _Residual(nn.Module):
    """Operations between its modules meet tensors of several devices."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        return x + y * self.second(y)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_a_checkpoint_runs_again_is_aligned_again(use_reentrant: bool) -> None:
    # Hooks were gone in the backward pass, or the operations between the modules met tensors of two
    # devices there.
    class Checkpoints(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.blocks = nn.Linear(4, 4), nn.ModuleList(_Residual() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            # is not captured for this
            x = torch.from_numpy(x.detach().cpu().numpy()).to(x.device)
            x = self.stem(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=use_reentrant)
            return x

    model, reference = twins(Checkpoints)
    with logical_devices(3):
        flow = DataFlow(model, fine_grained=True)
        places = {
            "stem": 0,
            "blocks.0.first": 1,
            "blocks.0.second": 2,
            "blocks.1.first": 0,
            "blocks.1.second": 1,
        }
        flow.layer_gpus.update(places)
        flow.update_flow()
        splits = [step(flow, model, (X,), {}) for _ in range(2)]
        assert flow.not_captured_because
        flow.undo()
    for split in splits:
        assert_same(split, step(reference, reference, (X,), {}))
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in model.modules())


def test_a_model_whose_backward_pass_is_to_come_is_copied_without_the_flow() -> None:
    model, _ = twins(lambda: nn.Sequential(_Residual(), nn.Linear(4, 4)))
    model.register_forward_hook(lambda *_: None)
    checkpointed = nn.ModuleDict({"inner": model})
    checkpointed.forward = lambda x: checkpoint(model, x, use_reentrant=False)  # type: ignore[method-assign]
    flow = DataFlow(checkpointed, ["cpu:0", "cpu:1"])
    flow.update_flow()
    expected = flow(X)
    again = copy.deepcopy(model)
    assert not again._forward_pre_hooks
    torch.testing.assert_close(again(X), expected)
    expected.sum().backward()


def test_tracing_leaves_parameters_that_forward_writes_to_as_they_were() -> None:
    # A profile had the teacher follow the student by a few steps that nobody had asked for.
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            # is not captured for this
            x = torch.from_numpy(x.detach().cpu().numpy()).to(x.device)
            with torch.no_grad():
                self.student.bias.clamp_(-0.1, 0.1)
                self.student.weight[0] = 0.5
                for mine, its in zip(
                    self.teacher.parameters(), self.student.parameters(), strict=True
                ):
                    mine.data.mul_(0.9).add_(its.data, alpha=0.1)
            return self.student(x) - self.teacher(x)

    model, reference = twins(Teacher)
    graph = capture_graph(model, X)
    assert not graph.captured and len(graph.layers) == 2
    for mine, its in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, its)
    assert_same(step(model, model, (X,), {}), step(reference, reference, (X,), {}))


def test_a_model_that_makes_a_kind_of_tensor_of_its_own_is_traced() -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)[None]
            y = nn.functional.scaled_dot_product_attention(
                y, y, y, attn_mask=causal_lower_right(len(x), len(x))
            )
            return self.second(y[0])

    graph = capture_graph(Biased().double(), X)
    assert not graph.captured
    assert len(graph.layers) == 2
