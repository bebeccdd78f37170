"""Attributes that forward puts items in: a capture leaves none behind, and a graph does not keep
their number."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from placer import DataFlow
from placer.testing import logical_devices

WIDTH = 6
Add = Callable[[Any], None]


def _count(items: Any) -> None:
    items["calls"] += 1


KINDS: dict[str, tuple[Callable[[], Any], Add]] = {
    "list": (list, lambda items: items.append(1)),
    "deque": (deque, lambda items: items.append(1)),
    "set": (set, lambda items: items.add(len(items))),
    "dict": (dict, lambda items: items.update({len(items): 1})),
    "defaultdict": (lambda: defaultdict(int), _count),
    "Counter": (Counter, _count),
}


class _Growing(nn.Module):
    """A model whose result depends on how often it was called."""

    def __init__(self, items: Any, add: Add, depends: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.items, self.add, self.depends = items, add, depends

    def forward(self, x: Tensor) -> Tensor:
        self.add(self.items)
        known = self.items.values() if isinstance(self.items, dict) else [1] * len(self.items)
        result: Tensor = self.head(self.body(x))
        return result * sum(known) if self.depends else result


def _flow(model: nn.Module) -> DataFlow:
    flow = DataFlow(model, device_ids=["cpu:0", "cpu:1"])
    flow.layer_gpus.update(body=0, head=1)
    flow.update_flow()
    return flow


@pytest.mark.parametrize(("make", "add"), KINDS.values(), ids=KINDS)
def test_a_model_that_counts_in_a_container_runs_as_unsplit(
    make: Callable[[], Any], add: Add
) -> None:
    torch.manual_seed(0)
    model, x = _Growing(make(), add, True).double(), torch.randn(4, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        each = nn.Sequential(model.body, model.head)(x)
        with logical_devices(2):
            flow = _flow(model)
            for number in range(1, 4):
                torch.testing.assert_close(flow(x).cpu(), number * each)
            assert "'items'" in flow.not_captured_because


@pytest.mark.covering(every=2)
@pytest.mark.parametrize(("make", "add"), KINDS.values(), ids=KINDS)
def test_a_capture_leaves_nothing_in_a_container(make: Callable[[], Any], add: Add) -> None:
    items = make()
    model, x = _Growing(items, add, False).double(), torch.randn(4, WIDTH, dtype=torch.float64)
    with torch.no_grad(), logical_devices(2):
        flow = _flow(model)
        flow(x)
        assert not flow.not_captured_because
        count = sum(items.values()) if isinstance(items, dict) else len(items)
        assert count <= 1
