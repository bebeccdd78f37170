"""Plain tensors: those that forward reads and that are neither parameters nor buffers nor inputs.

Before, each was copied to a device once, when layers were placed. So what forward wrote to it, and
what the user wrote to it between calls, was lost on other devices, and torch.export detached those
that require a gradient."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from plain_tables import DTYPE, INPUTS, USES, WHERE, Net, fresh
from torch import Tensor, nn
from torch.nn import functional

from placer import BatchOptions, DataFlow
from placer.testing import logical_devices


def _flow(net: Net) -> DataFlow:
    flow = DataFlow(net, device_ids=["cpu:0", "cpu:1"])
    # else micro-batches see what others wrote
    flow.batch_options = BatchOptions(verify="write" not in net.use)
    flow.layer_gpus.update(a=0, b=1, c=0)
    flow.update_flow()
    return flow


def _equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.detach().cpu(), other.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.covering(every=4)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("use", ["read", "write between"])
def test_layers_on_several_devices_read_one_wherever_it_lies(where: str, use: str) -> None:
    net = fresh(where, use)
    with torch.no_grad():
        expected = [tensor for x in INPUTS for tensor in (net(x), net.table().clone())]
    net = fresh(where, use)
    with logical_devices(2), torch.no_grad():
        flow = _flow(net)
        found = [tensor for x in INPUTS for tensor in (flow(x), net.table().clone())]
        assert not flow.not_captured_because
    _equal(found, expected)


@pytest.mark.covering
@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("use", USES)
def test_what_forward_writes_to_one_is_there_afterwards_in_micro_batches_too(
    use: str, hooks: bool
) -> None:
    use += " hooks" * hooks
    net = fresh("variable", use)
    with torch.no_grad():
        expected = [
            tensor
            for x in INPUTS
            for tensor in (torch.cat([net(part) for part in x.chunk(2)]), net.table().clone())
        ]
    net = fresh("variable", use)
    with logical_devices(2), torch.no_grad():
        flow = _flow(net)
        found = [tensor for x in INPUTS for tensor in (flow(x, chunks=2), net.table().clone())]
        assert bool(flow.not_captured_because) == hooks
    _equal(found, expected)


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("use", USES)
def test_streams_follow_what_forward_and_the_user_write_to_one(use: str) -> None:
    net = fresh("list", use)
    with torch.no_grad():
        expected = [net(x) for x in INPUTS]
        net.table().add_(1.0)
        expected += [net(x) for x in INPUTS]
    net = fresh("list", use)
    with logical_devices(2), torch.no_grad():
        flow = _flow(net)
        found = list(flow.stream(INPUTS))
        net.table().add_(1.0)
        found += list(flow.stream(INPUTS))
    _equal(found, [*expected])


@pytest.mark.parametrize("use", USES)
def test_training_steps_follow_what_forward_and_the_user_write_to_one(use: str) -> None:
    net = fresh("attribute", use, training=True)
    optimizer, expected = torch.optim.SGD(net.parameters(), lr=0.1), []
    for number, x in enumerate(INPUTS):
        if number == 2:
            net.own.add_(1.0)
        optimizer.zero_grad()
        for part in x.chunk(2):
            (functional.mse_loss(net(part), torch.zeros_like(part)) / 2).backward()
        optimizer.step()
        expected += [tensor.detach().clone() for tensor in (*net.parameters(), net.own)]
    net, found = fresh("attribute", use, training=True), []
    with logical_devices(2):
        flow = _flow(net)
        step = flow.train_step(functional.mse_loss, torch.optim.SGD(net.parameters(), lr=0.1))
        for number, x in enumerate(INPUTS):
            if number == 2:
                net.own.add_(1.0)
            step(x, torch.zeros_like(x), chunks=2)
            found += [tensor.detach().cpu().clone() for tensor in (*net.parameters(), net.own)]
        assert not flow.not_captured_because
    _equal(found, expected)


@pytest.mark.parametrize("where", ["attribute", "variable"])
def test_calls_follow_what_the_user_writes_to_one(where: str) -> None:
    net = fresh(where, "read")
    with torch.no_grad():
        before = net(INPUTS[0])
        net.table().add_(1.0)
        expected = net(INPUTS[0])
    assert not torch.allclose(before, expected)
    net = fresh(where, "read")
    with logical_devices(2), torch.no_grad():
        flow = _flow(net)
        found = [flow(INPUTS[0])]
        net.table().add_(1.0)
        found.append(flow(INPUTS[0]))
        assert net.table().device == torch.device("cpu")  # it stays where it was
    _equal(found, [before, expected])


@pytest.mark.parametrize("way", ["attribute", "parameter in a list", "variable"])
@pytest.mark.parametrize("steps", [False, True])
def test_one_that_requires_a_gradient_gets_it(way: str, steps: bool) -> None:
    """torch.export detaches such a tensor, so that the model must run through hooks."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
            self.scale = torch.full((6,), 2.0, dtype=DTYPE, requires_grad=way == "attribute")
            self.listed = [nn.Parameter(torch.full((6,), 2.0, dtype=DTYPE))]
            self.double()

        def used(self) -> Tensor:
            return {"attribute": self.scale, "variable": SCALE}.get(way, self.listed[0])

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x) * self.used()) * self.used()  # type: ignore[no-any-return]

    gradients = []
    for split in (False, True):
        torch.manual_seed(0)
        SCALE.grad = None
        net = Scaled().train()
        if not split:
            functional.mse_loss(net(INPUTS[0]), torch.zeros_like(INPUTS[0])).backward()
        with logical_devices(2) if split else nullcontext():
            flow = DataFlow(net, device_ids=["cpu:0", "cpu:1"])
            flow.layer_gpus.update(a=0, b=1)
            if split:
                flow.update_flow()
                if steps:
                    flow.train_step(functional.mse_loss)(
                        INPUTS[0], torch.zeros_like(INPUTS[0]), chunks=2
                    )
                else:
                    functional.mse_loss(
                        flow(INPUTS[0]).cpu(), torch.zeros_like(INPUTS[0])
                    ).backward()
                assert "register it as an nn.Parameter" in flow.not_captured_because
        gradient = net.used().grad
        assert gradient is not None
        gradients.append(gradient.cpu())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-12)


SCALE = torch.full((6,), 2.0, dtype=DTYPE, requires_grad=True)


class Overlapping(nn.Module):
    """Forward writes to one row of a table, of which a later layer reads the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.table = torch.rand(2, 6, dtype=DTYPE)
        self.row = self.table[0]
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.row.mul_(0.5)
        return self.b(self.a(x) + self.row) + self.table.sum(0)  # type: ignore[no-any-return]


def test_two_that_share_memory_are_no_two_copies_where_forward_writes_to_it() -> None:
    torch.manual_seed(0)
    net = Overlapping().eval()
    with torch.no_grad():
        expected = [net(x) for x in INPUTS]
    torch.manual_seed(0)
    net = Overlapping().eval()
    with logical_devices(2), torch.no_grad():
        flow = DataFlow(net, device_ids=["cpu:0", "cpu:1"])
        flow.layer_gpus.update(a=0, b=1)
        flow.update_flow()
        _equal([flow(x) for x in INPUTS], expected)
        assert "'row', 'table' share" in flow.not_captured_because


class Cached(nn.Module):
    """Keys of earlier calls in a plain tensor, as reference implementations of language models have
    them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.keys, self.values = (
            torch.zeros(2, 8, 4, dtype=DTYPE),
            torch.zeros(2, 8, 4, dtype=DTYPE),
        )
        self.double()

    def forward(self, x: Tensor, start: int) -> Tensor:
        stop = start + x.shape[1]
        self.keys[: x.shape[0], start:stop] = self.a(x)
        y = self.b(self.keys[: x.shape[0], :stop].sum(1, keepdim=True))
        self.values[: x.shape[0], start:stop] = y
        return self.values[: x.shape[0], :stop].sum(1)


def test_a_cache_of_earlier_calls_may_be_a_plain_tensor() -> None:
    torch.manual_seed(0)
    net = Cached().eval()
    x = torch.randn(2, 4, 4, dtype=DTYPE)
    with torch.no_grad():
        expected = [net(x[:, place : place + 1], place) for place in range(4)]
    kept = net.keys.clone()
    net.keys.zero_()
    net.values.zero_()
    with logical_devices(2), torch.no_grad():
        flow = DataFlow(net, device_ids=["cpu:0", "cpu:1"])
        flow.layer_gpus.update(a=0, b=1)
        flow.update_flow()
        _equal([flow(x[:, place : place + 1], place) for place in range(4)], expected)
        assert not flow.not_captured_because
    torch.testing.assert_close(net.keys, kept)
    assert not net.keys.requires_grad


class Repeated(nn.Module):
    """Python code asks for the value of a plain tensor, so that a graph holds what followed."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.times, self.calls = torch.tensor(2), torch.tensor(0)
        self.counts = False
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.calls += 1
            x = x * int(self.calls)
        x = self.a(x)
        for _ in range(int(self.times)):
            x = self.b(x)
        return x


@pytest.mark.parametrize("counts", [False, True])
def test_a_value_that_python_code_asks_for_may_change(counts: bool) -> None:
    torch.manual_seed(0)
    net = Repeated().eval()
    net.counts = counts
    x = torch.randn(2, 4, dtype=DTYPE)

    def run(model: Callable[[Tensor], Tensor]) -> list[Tensor]:
        net.calls.zero_()
        net.times.fill_(2)
        found = [model(x), model(x)]
        net.times.fill_(3)
        return [*found, model(x), net.calls.clone()]

    with torch.no_grad():
        expected = run(net)
        with logical_devices(2):
            flow = DataFlow(net, device_ids=["cpu:0", "cpu:1"])
            flow.layer_gpus.update(a=0, b=1)
            flow.update_flow()
            _equal(run(flow), expected)
