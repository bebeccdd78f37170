"""The memory of the halves of a backward pass, 4 bytes an element, each counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from placer.devices.allocator.storage_watch import StorageLog, key_of
from placer.profiler.backward_split.split_memory import measure_halves
from placer.profiler.memory import measure_memory

MIB = 2**20
BATCH, INSIDE, OUTSIDE = 8, 16, 32
linear: Callable[..., Tensor] = torch.ops.aten.linear.default
conv2d: Callable[..., Tensor] = torch.ops.aten.conv2d.default


def _tensor(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(shape, requires_grad=grad)


def test_the_half_by_input_of_a_linear_layer_makes_no_gradient_of_its_weight(
    make_trial: Any,
) -> None:
    halves = measure_halves(
        make_trial(linear, [_tensor(BATCH, INSIDE)], [_tensor(OUTSIDE, INSIDE), _tensor(OUTSIDE)])
    )
    assert halves.deferred == (4 * BATCH * OUTSIDE,)
    assert halves.input_grad_workspace_bytes == 4 * BATCH * (OUTSIDE + INSIDE)
    # it adds to the gradient in place as it multiplies
    assert halves.weight_grad_workspace_bytes == 0


def test_what_is_left_to_weight_passes_stays_while_the_half_by_input_goes_on(
    make_trial: Any,
) -> None:
    def chain(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            x = linear(x, weight)
        return x

    weights = [_tensor(INSIDE, INSIDE) for _ in range(5)]
    halves = measure_halves(make_trial(chain, [_tensor(BATCH, INSIDE)], weights))
    assert sum(halves.deferred) == 5 * 4 * BATCH * INSIDE
    # and the gradient of what the layer reads
    assert halves.input_grad_workspace_bytes == 6 * 4 * BATCH * INSIDE


def test_of_writes_those_are_told_whose_gradients_weight_passes_wait_with(make_trial: Any) -> None:
    def both(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        found = linear(x, weight)
        return functional.relu(found), found.detach(), linear(x, weight)

    halves = measure_halves(make_trial(both, [_tensor(BATCH, INSIDE)], [_tensor(OUTSIDE, INSIDE)]))
    assert len(halves.deferred) == 2
    assert halves.deferred_writes == {2}


def test_what_was_kept_leaves_no_room_to_the_half_by_input(make_trial: Any) -> None:
    def block(x: Tensor) -> Tensor:
        return torch.exp(torch.exp(torch.exp(x)))

    trial = make_trial(block, [_tensor(BATCH, INSIDE)])
    memory, size = measure_memory(trial, training=True), 4 * BATCH * INSIDE
    assert (
        memory.input_grad_workspace_bytes
        == measure_halves(trial).input_grad_workspace_bytes
        == 2 * size
    )
    assert memory.saved_bytes == 2 * size


def test_the_half_by_weight_holds_the_gradients_of_two_convolutions_at_a_time(
    make_trial: Any,
) -> None:
    def pair(x: Tensor, wide: Tensor, narrow: Tensor) -> Tensor:
        return conv2d(conv2d(x, wide, None, [1, 1], [1, 1]), narrow)

    state = [_tensor(8, 3, 3, 3), _tensor(2, 8, 1, 1)]
    halves = measure_halves(make_trial(pair, [_tensor(2, 3, 10, 10)], state))
    assert sorted(halves.deferred) == [4 * 2 * 2 * 100, 4 * 2 * 8 * 100]
    assert halves.weight_grad_workspace_bytes == 2 * 4 * 8 * 3 * 3 * 3


def test_a_layer_whose_weights_cannot_wait_does_all_of_its_backward_pass_at_once(
    make_trial: Any,
) -> None:
    gain = [_tensor(INSIDE), _tensor(INSIDE)]
    trial = make_trial(
        lambda x, a, b: functional.layer_norm(x, [INSIDE], a, b), [_tensor(BATCH, INSIDE)], gain
    )
    halves = measure_halves(trial)
    assert (halves.deferred, halves.weight_grad_workspace_bytes) == ((), 0)
    assert (
        halves.input_grad_workspace_bytes
        == measure_memory(trial, training=True).backward_workspace_bytes
    )


class _Once(torch.autograd.Function):
    """Refuses to run backwards where it might again, as what torch.compile makes does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        if torch._C._autograd._get_current_graph_task_keep_graph():
            raise RuntimeError("this backward function was compiled for retain_graph=False")
        return 2 * gradients[0]


def test_what_refuses_to_run_backwards_twice_is_measured_by_its_input_half_alone(
    make_trial: Any,
) -> None:
    def block(x: Tensor, weight: Tensor) -> Tensor:
        result: Tensor = _Once.apply(conv2d(x, weight))  # type: ignore[no-untyped-call]
        return result

    halves = measure_halves(make_trial(block, [_tensor(2, 3, 10, 10)], [_tensor(8, 3, 1, 1)]))
    assert halves.deferred == (4 * 2 * 8 * 100,)
    assert halves.input_grad_workspace_bytes >= 2 * 4 * 2 * 8 * 100
    assert halves.weight_grad_workspace_bytes == 0


def test_what_gradients_do_not_flow_through_takes_nothing(make_trial: Any) -> None:
    frozen = make_trial(
        linear, [_tensor(BATCH, INSIDE, grad=False)], [_tensor(OUTSIDE, INSIDE, grad=False)]
    )
    assert measure_halves(frozen) == type(measure_halves(frozen))()


def test_measuring_the_halves_leaves_no_gradients(make_trial: Any) -> None:
    trial = make_trial(linear, [_tensor(BATCH, INSIDE)], [_tensor(OUTSIDE, INSIDE)])
    measure_halves(trial)
    assert [tensor.grad for tensor in (*trial.parameters, *trial.reads)] == [None, None]


@pytest.mark.parametrize("operations", range(1, 6))
def test_a_later_gradient_at_the_address_of_a_freed_one_does_not_defer_its_write(
    make_trial: Any, operations: int
) -> None:
    def block(x: Tensor, weight: Tensor) -> Tensor:
        x = linear(x, weight)
        for _ in range(operations):
            x = torch.tanh(x)
        return x

    halves = measure_halves(make_trial(block, [_tensor(BATCH, INSIDE)], [_tensor(INSIDE, INSIDE)]))
    # the gradient of the write ends before the gradient of the product is made
    assert halves.deferred == (4 * BATCH * INSIDE,)
    assert halves.deferred_writes == frozenset()


def test_a_storage_at_the_address_of_a_freed_one_counts() -> None:
    log = StorageLog(torch.device("cpu"), [])
    for _ in range(100):
        gone = torch.ones(INSIDE)
        log.ignore([gone])
        key = key_of(gone)
        del gone
        with log:
            fresh = torch.ones(INSIDE)
        if key_of(fresh) == key:
            assert log.live[key] == 4 * INSIDE
            return
    pytest.skip("no address was used again")
