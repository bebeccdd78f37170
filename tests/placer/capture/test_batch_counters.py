"""Batch counters: additions in one kernel have the same effect as one kernel each."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from placer import DataFlow
from placer.capture.batch_counters import added_together
from placer.testing import logical_devices

ADD = torch.ops.aten.add_.Tensor


class _Operations(TorchDispatchMode):
    """A mode that counts operations on integers, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0][0] if args and isinstance(args[0], list) else args[0] if args else None
        if isinstance(first, Tensor) and first.dtype == torch.int64:
            self.seen[func.name()] += 1
        return func(*args, **(kwargs or {}))


class _Twice(nn.Module):
    """Normalisations in parallel and one that is called twice, whose counter increases by two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = (nn.BatchNorm1d(4) for _ in range(3))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(self.first(x))
        result: Tensor = self.last(self.linear(self.shared(x)))
        return result


def test_what_is_added_to_counters_is_there_at_the_end_in_one_operation() -> None:
    counted = [torch.tensor(number) for number in (3, 5)]
    other = torch.tensor(7)
    with _Operations() as operations:
        with added_together(counted):
            ADD(counted[0], 1)
            ADD(counted[1], 1)
            ADD(counted[0], 1)
            ADD(other, 1)
            assert [int(counter) for counter in counted] == [3, 5]
    assert [int(counter) for counter in (*counted, other)] == [5, 6, 8]
    assert operations.seen["aten::_foreach_add_.ScalarList"] == 1
    assert operations.seen["aten::add_.Tensor"] == 1, "what is no counter is left alone"


def test_a_pass_that_fails_leaves_counters_as_they_were() -> None:
    counted = [torch.tensor(3), torch.tensor(5)]
    together = added_together(counted)
    with pytest.raises(ValueError, match="stop"), together:
        ADD(counted[0], 1)
        raise ValueError("stop")
    with together:
        ADD(counted[1], 1)
    assert [int(counter) for counter in counted] == [3, 6]


@pytest.mark.parametrize("recompute", [False, True])
def test_training_counts_as_the_unsplit_model_does_with_an_operation_for_each_pass(
    recompute: bool,
) -> None:
    torch.manual_seed(0)
    model = _Twice().double()
    whole = copy.deepcopy(model)
    inputs, target = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    with logical_devices(2):
        flow = DataFlow(model, fine_grained=True)
        for name in flow.layer_gpus:
            flow.layer_gpus[name] = 1 if name.startswith(("linear", "last")) else 0
        flow.update_flow()
        flow.recompute = [0, 1] if recompute else []
        step = flow.train_step(nn.functional.mse_loss, None)
        step(inputs, target, chunks=2)
        with _Operations() as operations:
            step(inputs, target, chunks=2)
    for _ in range(2):
        for part, goal in zip(inputs.chunk(2), target.chunk(2), strict=True):
            nn.functional.mse_loss(whole(part), goal).backward()
    for name, buffer in whole.named_buffers():
        torch.testing.assert_close(model.get_buffer(name).cpu(), buffer, msg=name)
    assert operations.seen["aten::_foreach_add_.ScalarList"] == 2, (
        "the first device has several counters"
    )
