"""Plain tensors that several layers read: in a profile they are values like others, and tie no
layers together.

Before, layers that read one plain tensor had to share a device, as if each of them changed it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import placer
from placer.capture.capture import capture_graph
from placer.capture.serialization import to_wire

VARIABLE = torch.rand(64)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return self.linear(x) * table  # type: ignore[no-any-return]


class Tables(nn.Module):
    """Six blocks that read one table."""

    on_class = torch.rand(64)

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.attribute = torch.rand(64)
        self.items = [torch.rand(64)]
        self.register_buffer("buffer", torch.rand(64))

    def forward(self, x: Tensor) -> Tensor:
        places: dict[str, Callable[[], Tensor]] = {
            "buffer": lambda: self.buffer,  # type: ignore[dict-item, return-value]
            "attribute": lambda: self.attribute,
            "list": lambda: self.items[0],
            "class": lambda: self.on_class,
            "variable": lambda: VARIABLE,
        }
        for block in self.blocks:
            x = block(x, places[self.where]())
        return x


@pytest.mark.covering
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("where", ["attribute", "list", "class", "variable"])
def test_a_plain_tensor_is_in_a_profile_what_a_buffer_is(where: str, training: bool) -> None:
    found, expected = (
        placer.profile(
            Tables(one).train(training),
            torch.randn(4, 64),
            devices=["cpu:0"],
            training=training,
            cache=False,
        )
        for one in (where, "buffer")
    )
    assert found.captured and not found.colocated
    assert [(e.source, e.targets, e.bytes, e.gradient_bytes) for e in found.edges] == [
        (e.source, e.targets, e.bytes, e.gradient_bytes) for e in expected.edges
    ]
    assert [layer.buffer_bytes for layer in found.layers] == [
        layer.buffer_bytes for layer in expected.layers
    ]


@pytest.mark.parametrize("where", ["buffer", "attribute", "variable"])
def test_blocks_that_read_one_table_may_be_on_two_devices(where: str) -> None:
    model = Tables(where).eval()
    most = int(0.7 * sum(parameter.nbytes for parameter in model.parameters()))
    placement = placer.suggest(
        model,
        torch.randn(4, 64),
        devices=["cpu:0", "cpu:1"],
        training=False,
        progress=False,
        memory_bytes=most,
        cache=False,
    )
    assert len(set(placement.layer_devices.values())) == 2


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.table, self.calls = torch.ones(8), torch.tensor(0)

    def forward(self, x: Tensor) -> Tensor:
        self.table.mul_(0.5)
        self.table[0] += 1
        self.calls += 1
        x = self.b(self.a(x) * self.table)
        self.table.add_(x.mean(0))
        return x * self.calls


@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_profiling_leaves_a_plain_tensor_as_it_is_that_forward_writes_to(
    training: bool, hooks: bool
) -> None:
    model = Written().train(training)
    if hooks:
        model.register_forward_hook(lambda *_: None)
    # with a look at the cache, too
    placer.profile(model, torch.randn(2, 8), devices=["cpu:0"], training=training)
    assert model.table.equal(torch.ones(8)) and model.calls.item() == 0
    assert not model.table.requires_grad and model.table.grad_fn is None


def test_layers_that_one_changes_it_for_stay_together() -> None:
    graph = capture_graph(Written().eval(), torch.randn(2, 8), granularity="submodule")
    assert graph.captured and graph.colocated == (("a", "b"),)


def test_a_service_is_sent_the_shape_of_a_plain_tensor_and_who_reads_it() -> None:
    graph = to_wire(capture_graph(Tables("list").eval(), torch.randn(4, 64), granularity="fine"))
    (constant,) = (state for state in graph.state if state.kind == "constant")
    assert constant.shape == (64,) and not graph.colocated
    readers = [layer.name for layer in graph.layers if constant.name in layer.state]
    assert readers == ["blocks.0.linear"]
