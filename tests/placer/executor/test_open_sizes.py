"""Inputs of many shapes: what was of two sizes is left open, so that a third needs no capture of
its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counted_captures import count_captures
from splitting import assert_same, scatter_layers, step, twins
from torch import Tensor, nn
from torch.nn import functional

from placer import DataFlow
from placer.executor import model_captures
from placer.testing import logical_devices
from placer.zoo import gpt


class Attends(nn.Module):
    """Causal attention over a sequence of any length, with a mask that is made from it."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        length = ids.shape[1]
        queries, keys, values = self.qkv(x).chunk(3, -1)
        scores = queries @ keys.mT / length**0.5
        hidden = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
        mixed = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values
        return self.head(self.norm(x + mixed))


class Images(nn.Module):
    """Convolutions and a skip over images of any height and width."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.up = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        down = torch.relu(self.norm(self.down(x)))
        up = functional.interpolate(self.up(down), size=x.shape[-2:])
        return self.head(
            torch.cat([up, functional.interpolate(down, size=x.shape[-2:])]).mean((2, 3))
        )


class Branches(nn.Module):
    """Does something else with long inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.long = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.long(x).sum(1) if x.shape[1] > 8 else self.short(x).mean(1)
        return result


class OfOneLength(nn.Module):
    """Asks for its length as a number, so that each one has a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.first(x) / float(x.shape[1])).sum(1)
        return result


def _ids(length: int, batch: int = 3) -> Tensor:
    return torch.randint(20, (batch, length), generator=torch.Generator().manual_seed(length))


def _floats(*shape: int) -> Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))
    )


def _assert_all_equal(
    make: Any, inputs: list[Tensor], training: bool = True, **options: Any
) -> None:
    """Each in turn gives what the unsplit model gives: results, gradients, buffers."""
    model, reference = twins(make, training)
    with logical_devices(3):
        flow = DataFlow(model, fine_grained=True)
        scatter_layers(flow, 3)
        for x in inputs:
            split = step(flow, model, (x,), options)
            assert flow.not_captured_because == ""
            assert_same(split, step(reference, reference, (x,), {}))


def test_a_third_length_has_the_model_captured_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_captures(monkeypatch)
    _assert_all_equal(Attends, [_ids(length) for length in (5, 7, 40, 2, 5)])
    assert len(made) == 2


def test_a_batch_as_large_as_a_length_is_told_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = count_captures(monkeypatch)
    _assert_all_equal(Attends, [_ids(3), _ids(6, 6), _ids(6, 2), _ids(3, 5)])
    assert len(made) == 2


def test_a_length_and_a_batch_of_one_have_graphs_of_their_own() -> None:
    """torch takes a size of one for fixed: what is added to it may be spread over it."""
    _assert_all_equal(
        Attends,
        [_ids(5), _ids(1), _ids(7), _ids(7, 1), _ids(1, 1), _ids(8, 1)],
    )


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("training", [True, False])
def test_images_of_any_height_and_width(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [(8, 8), (12, 8), (12, 10), (9, 15), (16, 4)]
    made = count_captures(monkeypatch)
    _assert_all_equal(Images, [_floats(2, 3, *size) for size in sizes], training)
    assert len(made) == 3  # the second is of another height alone


def test_what_a_model_does_with_long_inputs_alone_is_captured_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = count_captures(monkeypatch)
    _assert_all_equal(Branches, [_floats(3, length, 4) for length in (4, 5, 9, 6, 12, 8)])
    assert len(made) == 3


def test_a_model_that_holds_for_one_length_is_captured_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = count_captures(monkeypatch)
    _assert_all_equal(OfOneLength, [_floats(3, length, 4) for length in (4, 5, 6, 5, 4)])
    assert len(made) == 3


class Rounds(OfOneLength):
    """A number of its length in a tensor, which says how much is taken: known where the length is a
    number."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.first(x)) * int(torch.tensor(x.shape[1] / 2).ceil())
        return result


class Asks(OfOneLength):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        result: Tensor = self.last(y * 2 if torch.tensor(x.shape[1]) > 5 else y).sum(1)
        return result


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("make", [Rounds, Asks])
def test_what_cannot_be_captured_with_an_open_length_is_captured_for_each(make: Any) -> None:
    """It ran through hooks from the second length on, and with clones not at all."""
    _assert_all_equal(make, [_floats(3, length, 4) for length in (5, 6, 7, 5)])
    model, reference = twins(make, training=False)
    with logical_devices(2), torch.no_grad():
        flow = DataFlow(model, enable_clone=True)
        scatter_layers(flow, 2)
        for length in (5, 6, 7):
            torch.testing.assert_close(
                flow(_floats(3, length, 4)).cpu(), reference(_floats(3, length, 4))
            )


class Counts(OfOneLength):
    """Counts tokens and calls in buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("tokens", torch.zeros(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.tokens += x.shape[1]
        self.calls += 1
        result: Tensor = self.last(self.first(x)) * self.tokens
        return result


class ScalesLate(OfOneLength):
    """A parameter of its own is used before the layers for short inputs, and behind them for long
    ones."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 8:
            return self.last(self.first(x)) * self.scale[:2]
        result: Tensor = self.last(self.first(x) * self.scale)
        return result


@pytest.mark.parametrize("make", [Counts, ScalesLate])
def test_state_of_the_model_itself_is_found_whatever_length_came_before(make: Any) -> None:
    _assert_all_equal(make, [_floats(3, length, 4) for length in (5, 12, 6, 20, 5)])


class TellsSizes(OfOneLength):
    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x)), x.shape, slice(0, x.shape[1]), [x.shape[1] - 1]


def test_sizes_that_are_returned_are_those_of_the_call() -> None:
    """A ``torch.Size`` and a slice were those of the capture, in symbols."""
    model, reference = twins(TellsSizes)
    with logical_devices(2):
        flow = DataFlow(model)
        scatter_layers(flow, 2)
        for length in (5, 7, 6, 9):
            found, expected = flow(_floats(3, length, 4)), reference(_floats(3, length, 4))
            assert found[1:] == expected[1:] and type(found[1]) is torch.Size


def test_sizes_that_take_too_long_to_prove_are_not_left_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch took minutes for a Swin whose height was open, and the next height needed a capture all
    the same."""
    monkeypatch.setattr(model_captures, "_PATIENCE", 0.0)
    made = count_captures(monkeypatch)
    _assert_all_equal(Attends, [_ids(length) for length in (5, 7, 6)])
    assert len(made) == 3


class Step(OfOneLength):
    """Takes a list with a number that its caller counts up."""

    def forward(self, x: Tensor, state: list[int]) -> Tensor:
        state[0] += 1
        result: Tensor = self.last(self.first(x)) * state[0]
        return result


def test_calls_of_which_none_comes_back_run_through_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a sliding window's cache, which counts tokens: each token had a large model
    captured again."""
    model, reference = twins(Step)
    made = count_captures(monkeypatch)
    x = _floats(3, 5, 4)
    with logical_devices(2):
        flow = DataFlow(model)
        scatter_layers(flow, 2)
        ours, theirs = [0], [0]
        for _ in range(4):
            torch.testing.assert_close(flow(x, ours).cpu(), reference(x, theirs))
        with pytest.warns(UserWarning, match="calls captured the model again"):
            torch.testing.assert_close(flow(x, ours).cpu(), reference(x, theirs))
        for _ in range(8):
            torch.testing.assert_close(flow(x, ours).cpu(), reference(x, theirs))
        assert (len(made), ours, flow.not_captured_because) == (4, theirs, "")
        for _ in range(200):  # one that does come back is captured in the end
            torch.testing.assert_close(flow(x, [20]).cpu(), reference(x, [20]))
    assert len(made) == 5


def test_steps_and_streams_do_not_capture_every_shape_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, reference = twins(OfOneLength)
    made = count_captures(monkeypatch)
    inputs = [_floats(4, length, 4) for length in range(3, 13)]
    target = torch.zeros(4, 2, dtype=torch.float64)
    with logical_devices(2), pytest.warns(UserWarning, match="calls captured the model again"):
        flow = DataFlow(model)
        scatter_layers(flow, 2)
        train = flow.train_step(functional.mse_loss)
        for x in inputs:
            loss = functional.mse_loss(reference(x), target).detach()
            torch.testing.assert_close(train(x, target, chunks=2).cpu(), loss)
        assert len(made) == 5  # the first, and four of other lengths
        flow.eval(), reference.eval()
        for x, result in zip(inputs, flow.stream(inputs), strict=True):
            torch.testing.assert_close(result.cpu(), reference(x))
    assert len(made) <= 8


def test_micro_batches_of_many_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = twins(Attends)
    made = count_captures(monkeypatch)
    with logical_devices(3):
        flow = DataFlow(model, fine_grained=True)
        scatter_layers(flow, 3)
        for length in (5, 7, 12):
            torch.testing.assert_close(
                flow(_ids(length, 7), chunks=3).cpu(), reference(_ids(length, 7))
            )
    assert len(made) == 2


def test_calls_and_streams_of_many_lengths() -> None:
    model, reference = twins(Attends, training=False)
    lengths = (5, 7, 6, 12, 6)
    with logical_devices(3), torch.no_grad():
        flow = DataFlow(model, fine_grained=True)
        scatter_layers(flow, 3)
        for length in lengths:
            torch.testing.assert_close(
                flow(_ids(length, 6), chunks=2).cpu(), reference(_ids(length, 6))
            )
        streamed = list(flow.stream([_ids(length) for length in lengths]))
    for length, result in zip(lengths, streamed, strict=True):
        torch.testing.assert_close(result.cpu(), reference(_ids(length)))


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("schedule", ["fill-drain", "1f1b", "zero-bubble"])
def test_training_steps_of_many_lengths(schedule: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss_fn(scores: Tensor, ids: Tensor) -> Tensor:
        return functional.cross_entropy(scores.flatten(0, 1), ids.flatten())

    model, reference = twins(Attends)
    theirs = torch.optim.SGD(reference.parameters(), lr=0.5)
    made = count_captures(monkeypatch)
    with logical_devices(3):
        flow = DataFlow(model, fine_grained=True)
        scatter_layers(flow, 3)
        train = flow.train_step(
            loss_fn, torch.optim.SGD(model.parameters(), lr=0.5), schedule=schedule
        )
        for length in (5, 7, 12, 5):
            ids = _ids(length, 6)
            loss = train(ids, ids, chunks=3)
            theirs.zero_grad()
            expected = loss_fn(reference(ids), ids)
            expected.backward()
            theirs.step()
            torch.testing.assert_close(loss.cpu(), expected.detach())
        found = {name: weight.detach().cpu() for name, weight in model.named_parameters()}
    assert len(made) == 2
    for name, weight in reference.named_parameters():
        torch.testing.assert_close(found[name], weight.detach())


class Cached(nn.Module):
    """Attention over all that came before, which lies in a list that the caller keeps."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.head = nn.Linear(width, width)

    def forward(self, x: Tensor, past: list[Tensor]) -> Tensor:
        for number, layer in enumerate((self.first, self.second)):
            new = layer(x)
            if number < len(past):
                past[number] = torch.cat([past[number], new], 1)
            else:
                past.append(new)
            x = x + (new @ past[number].mT).softmax(-1) @ past[number]
        result: Tensor = self.head(x)
        return result


def test_a_cache_that_grows_by_a_token_a_call_has_the_model_captured_three_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, reference = twins(Cached, training=False)
    tokens = [_floats(2, length, 8) for length in (4, 1, 1, 1, 1, 1, 1)]
    made = count_captures(monkeypatch)
    with logical_devices(3), torch.no_grad():
        flow = DataFlow(model)
        scatter_layers(flow, 3)
        ours: list[Tensor] = []
        theirs: list[Tensor] = []
        for token in tokens:
            torch.testing.assert_close(flow(token, ours).cpu(), reference(token, theirs))
        torch.testing.assert_close([kept.cpu() for kept in ours], theirs)
    assert len(made) == 3


def test_a_gpt_trains_on_lengths_up_to_its_context() -> None:
    def make() -> nn.Module:
        return gpt(layers=1, width=16, heads=2, vocabulary=20, context=16, tied=True)

    _assert_all_equal(make, [_ids(length) for length in (16, 9, 4)])
