"""What is expected follows from the operations: 4 bytes an element, and what each backward formula
reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import placer
from placer import devices
from placer.profiler.memory import measure_memory

BATCH, INSIDE, OUTSIDE = 8, 16, 32


def _tensor(*shape: int, grad: bool = True) -> Tensor:
    return torch.randn(shape, requires_grad=grad)


def test_linear_keeps_what_it_reads_and_needs_the_gradients_of_both_ends(make_trial: Any) -> None:
    trial = make_trial(
        functional.linear, [_tensor(BATCH, INSIDE)], [_tensor(OUTSIDE, INSIDE), _tensor(OUTSIDE)]
    )
    memory = measure_memory(trial, training=True)
    assert memory.saved_bytes == 0
    assert (memory.saved_reads, memory.saved_writes) == ({0}, set())
    assert memory.forward_workspace_bytes == 4 * BATCH * OUTSIDE
    # until they are added to those of earlier micro-batches
    new_gradients = 4 * (OUTSIDE * INSIDE + OUTSIDE)
    assert memory.backward_workspace_bytes == 4 * (BATCH * OUTSIDE + BATCH * INSIDE) + new_gradients


def test_a_linear_whose_input_needs_no_gradient_needs_that_of_its_output_alone(
    make_trial: Any,
) -> None:
    trial = make_trial(
        functional.linear, [_tensor(BATCH, INSIDE, grad=False)], [_tensor(OUTSIDE, INSIDE)]
    )
    memory = measure_memory(trial, training=True)
    assert memory.backward_workspace_bytes == 4 * (BATCH * OUTSIDE + OUTSIDE * INSIDE)


def test_a_frozen_linear_does_not_keep_what_it_reads(make_trial: Any) -> None:
    trial = make_trial(
        functional.linear, [_tensor(BATCH, INSIDE)], [_tensor(OUTSIDE, INSIDE, grad=False)]
    )
    memory = measure_memory(trial, training=True)
    assert (memory.saved_reads, memory.saved_writes, memory.saved_bytes) == (set(), set(), 0)
    assert memory.forward_workspace_bytes == 4 * (BATCH * INSIDE + BATCH * OUTSIDE)


def test_relu_keeps_what_it_writes(make_trial: Any) -> None:
    memory = measure_memory(make_trial(functional.relu, [_tensor(BATCH, INSIDE)]), training=True)
    assert (memory.saved_reads, memory.saved_writes, memory.saved_bytes) == (set(), {0}, 0)
    # the read, which is not kept
    assert memory.forward_workspace_bytes == 4 * BATCH * INSIDE
    assert memory.backward_workspace_bytes == 2 * 4 * BATCH * INSIDE


def test_relu_in_place_on_what_another_layer_wrote_makes_nothing(make_trial: Any) -> None:
    trial = make_trial(torch.relu_, [_tensor(BATCH, INSIDE)], mutated_reads=[0])
    memory = measure_memory(trial, training=True)
    assert (memory.saved_reads, memory.saved_writes, memory.saved_bytes) == (set(), {0}, 0)
    assert memory.forward_workspace_bytes == 0


def test_a_new_gradient_is_freed_before_the_next_is_made(make_trial: Any) -> None:
    def chain(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return functional.linear(functional.linear(x, first), second)

    size = 64  # weights far larger than activations
    state = [_tensor(size, size), _tensor(size, size)]
    memory = measure_memory(make_trial(chain, [_tensor(2, size)], state), training=True)
    assert memory.backward_workspace_bytes < 4 * (2 * size * size)


def test_the_gradient_of_what_a_layer_writes_is_freed_once_it_was_used(make_trial: Any) -> None:
    chain = make_trial(lambda x: x.neg().neg().neg(), [_tensor(BATCH, INSIDE)])
    # not 3
    assert measure_memory(chain, training=True).backward_workspace_bytes == 2 * 4 * BATCH * INSIDE


def test_a_chain_keeps_what_is_between_its_operations_once(make_trial: Any) -> None:
    def chain(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return functional.linear(functional.relu(functional.linear(x, first)), second)

    trial = make_trial(
        chain, [_tensor(BATCH, INSIDE)], [_tensor(OUTSIDE, INSIDE), _tensor(INSIDE, OUTSIDE)]
    )
    memory = measure_memory(trial, training=True)
    # relu's result, kept by relu and by the second linear
    assert memory.saved_bytes == 4 * BATCH * OUTSIDE
    assert memory.saved_reads == {0}


def test_conv_bn_relu_in_place_keeps_the_convolution_and_two_statistics(make_trial: Any) -> None:
    def block(
        x: Tensor, weight: Tensor, gain: Tensor, shift: Tensor, mean: Tensor, var: Tensor
    ) -> Tensor:
        y = functional.conv2d(x, weight, padding=1)
        return torch.relu_(functional.batch_norm(y, mean, var, gain, shift, training=True))

    channels, image = 8, (2, 8, 10, 10)
    state = [
        _tensor(channels, 3, 3, 3),
        _tensor(channels),
        _tensor(channels),
        torch.zeros(channels),
        torch.ones(channels),
    ]
    memory = measure_memory(make_trial(block, [_tensor(2, 3, 10, 10)], state), training=True)
    assert memory.saved_bytes == 4 * (torch.Size(image).numel() + 2 * channels)
    assert (memory.saved_reads, memory.saved_writes) == ({0}, {0})


def test_views_of_one_storage_are_kept_once(make_trial: Any) -> None:
    def squares(x: Tensor) -> Tensor:
        y = x + 1
        left, right = y.chunk(2)
        return left * right * y[:4]

    memory = measure_memory(make_trial(squares, [_tensor(BATCH, INSIDE)]), training=True)
    # y, and left * right
    assert memory.saved_bytes == 4 * BATCH * INSIDE + 4 * BATCH // 2 * INSIDE


def test_what_a_write_is_a_small_view_of_is_kept_whole(make_trial: Any) -> None:
    memory = measure_memory(
        make_trial(lambda x: torch.exp(x)[:1], [_tensor(BATCH, INSIDE)]), training=True
    )
    assert memory.saved_writes == {0}
    assert memory.saved_bytes == 4 * (BATCH - 1) * INSIDE


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        # not through save_for_backward, so that no hook of autograd sees it
        ctx.kept = x + 0
        return x * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * ctx.kept * gradients[0]


def test_what_a_custom_function_keeps_on_its_context_counts(make_trial: Any) -> None:
    memory = measure_memory(make_trial(_Square.apply, [_tensor(BATCH, INSIDE)]), training=True)
    assert memory.saved_bytes == 4 * BATCH * INSIDE


def test_a_temporary_counts_while_it_lives(make_trial: Any) -> None:
    def wide(x: Tensor) -> Tensor:
        return x.repeat(1, 10).sum(1)  # neither needs its input for its gradient

    memory = measure_memory(make_trial(wide, [_tensor(BATCH, INSIDE)]), training=True)
    assert memory.saved_bytes == 0
    assert memory.forward_workspace_bytes == 4 * (10 * BATCH * INSIDE + BATCH) + 4 * BATCH * INSIDE


def test_inference_keeps_nothing_and_counts_temporaries_beyond_what_it_writes(
    make_trial: Any,
) -> None:
    def chain(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return functional.linear(functional.linear(x, first), second)

    state = [_tensor(OUTSIDE, INSIDE), _tensor(INSIDE, OUTSIDE)]
    memory = measure_memory(
        make_trial(chain, [_tensor(BATCH, INSIDE)], state, training=False), training=False
    )
    assert (memory.saved_bytes, memory.saved_reads, memory.saved_writes) == (0, set(), set())
    assert memory.forward_workspace_bytes == 4 * BATCH * OUTSIDE
    assert memory.backward_workspace_bytes == 0


def test_state_that_is_written_as_a_value_takes_no_memory_of_its_own(make_trial: Any) -> None:
    trial = make_trial(
        lambda x, buffer: (x + buffer, buffer),
        [_tensor(BATCH, INSIDE)],
        [torch.randn(BATCH, INSIDE)],
    )
    memory = measure_memory(trial, training=True)
    assert (memory.saved_bytes, memory.saved_writes) == (0, set())
    # the sum and the read
    assert memory.forward_workspace_bytes == 2 * 4 * BATCH * INSIDE


def test_measuring_twice_gives_the_same(make_trial: Any) -> None:
    trial = make_trial(lambda x: functional.softmax(x.exp(), 1), [_tensor(BATCH, INSIDE)])
    assert measure_memory(trial, training=True) == measure_memory(trial, training=True)


def test_what_autograd_kept_and_dropped_inside_the_layer_is_not_kept(make_trial: Any) -> None:
    def wasteful(x: Tensor) -> tuple[Tensor, ...]:
        for _ in range(20):
            x.exp().sum()  # kept for a backward pass that can never come
        # of which some lie where those were
        return tuple(x + number for number in range(20))

    memory = measure_memory(make_trial(wasteful, [_tensor(BATCH, INSIDE)]), training=True)
    assert (memory.saved_bytes, memory.saved_reads, memory.saved_writes) == (0, set(), set())


def test_what_stands_empty_beside_a_layers_tensors_is_the_most_of_both_passes(
    make_trial: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = make_trial(functional.relu, [_tensor(BATCH, INSIDE)])
    for passes, training in (([3, 5], True), ([5, 3], True), ([3], False)):
        counted = iter(passes)
        monkeypatch.setattr(devices, "fragmented_bytes", lambda _, counted=counted: next(counted))
        assert measure_memory(trial, training=training).fragmented_bytes == max(passes)


def test_a_recorded_backward_pass_frees_nothing_of_what_was_kept(make_trial: Any) -> None:
    def layer(x: Tensor) -> Tensor:
        return x.repeat(64, 1).exp().exp().sum(0)

    found = measure_memory(
        make_trial(layer, [torch.randn(1, 1024, requires_grad=True)]), training=True
    )
    large, small = 4 * 64 * 1024, 4 * 1024
    # Two large gradients at a time; meanwhile what the second of the two was kept for is no longer
    # needed.
    assert found.backward_workspace_bytes == pytest.approx(large, abs=4 * small)
    assert found.recorded_workspace_bytes == pytest.approx(2 * large, abs=4 * small)


def test_a_recorded_backward_pass_makes_no_gradient_beside_the_one_that_it_adds_to(
    make_trial: Any,
) -> None:
    linear: Any = torch.ops.aten.linear.default
    trial = make_trial(
        linear,
        [torch.randn(2, 256, requires_grad=True)],
        [torch.randn(256, 256, requires_grad=True)],
    )
    found = measure_memory(trial, training=True)
    assert found.backward_workspace_bytes >= 4 * 256 * 256 > 10 * found.recorded_workspace_bytes


def test_what_a_profile_says_of_a_recorded_pass_may_be_less_than_of_an_eager_one() -> None:
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))
    found = placer.profile(model, torch.randn(4, 1024), training=True, progress=False)
    for layer in (found.layers[0], found.layers[2]):
        assert layer.backward_workspace_bytes >= 4 * 1024 * 1024
        assert 0 < layer.recorded_workspace_bytes < 10 * 4 * 4 * 1024
