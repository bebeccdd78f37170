"""Batches in which micro-batches have unequal numbers of labels that count, and losses whose values
hide it.

A comparison of the first batch, or of its first samples, says nothing about these: each test names
why."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from placer import BatchOptions, DataFlow
from placer.errors import BatchError, InputError
from placer.testing import logical_devices

SAMPLES, WIDTH, CLASSES = 8, 6, 5
EQUAL = torch.tensor([1, -1, 2, -1, 3, -1, 4, -1])
UNEQUAL = torch.tensor([1, 3, 2, 0, 3, -1, -1, -1])
Loss = Callable[[Any, Any], Tensor]


def _flow(model: nn.Module) -> DataFlow:
    flow = DataFlow(model, device_ids=["cpu:0", "cpu:1"])
    for index, name in enumerate(flow.layer_gpus):
        flow.layer_gpus[name] = min(index, 1)
    flow.update_flow()
    return flow


def _classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)).double()


def _inputs() -> Tensor:
    return torch.randn(
        SAMPLES, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )


def _mean_over_known(output: Tensor, target: Tensor) -> Tensor:
    known = target >= 0
    each = functional.cross_entropy(output, target.clamp(min=0), reduction="none")
    return (each * known).sum() / known.sum()


def _half(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, ignore_index=-1) * 0.5


def _over_zeros(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, ignore_index=0) * 0.5


def _by_mask(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    labels, known = target
    return (functional.cross_entropy(output, labels, reduction="none") * known).sum() / known.sum()


def _over_fours(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, ignore_index=4) * 0.5


def _over(counts: Callable[[Tensor], Tensor], output: Tensor, target: Tensor) -> Tensor:
    """Return the mean of errors over the entries of a target that count."""
    counted = counts(target)
    errors = (output - target.nan_to_num()) ** 2
    return (errors * counted).sum() / counted.sum()


def _over_lengths(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    values, lengths = target
    places = torch.arange(CLASSES, device=lengths.device)
    return _over(lambda _: places < lengths[:, None], output, values)


def _over_below_255(output: Tensor, target: Tensor) -> Tensor:
    counted = target != 255
    each = functional.cross_entropy(output, target.clamp(max=4).long(), reduction="none")
    return (each * counted).sum() / counted.sum()


def _filled(value: float) -> Tensor:
    """Return a target of floats in which this number stands for the ones that are missing."""
    return torch.where(UNEQUAL[:, None] > 0, VALUES, value)


LABELS = torch.tensor([1, 2, 3, 4, 1, 2, 3, 4])
VALUES = torch.linspace(-2, 2, SAMPLES * CLASSES, dtype=torch.float64).view(SAMPLES, CLASSES)
ONES = torch.eye(CLASSES, dtype=torch.float64)
LATER: dict[str, tuple[Loss, Any, Any]] = {
    "negative labels": (_mean_over_known, EQUAL, UNEQUAL),
    "part of torch's loss": (_half, EQUAL, UNEQUAL),
    "all labels at first": (_half, LABELS, UNEQUAL),
    "label 0": (_over_zeros, LABELS, torch.tensor([1, 2, 3, 4, 1, 0, 0, 0])),
    "a label that torch's loss leaves out": (
        _over_fours,
        LABELS,
        torch.tensor([1, 2, 3, 1, 1, 2, 4, 4]),
    ),
    "a mask": (_by_mask, (LABELS, LABELS > 0), (LABELS, UNEQUAL > 0)),
    "missing floats": (partial(_over, lambda values: values != -9), VALUES, _filled(-9)),
    "NaN": (partial(_over, lambda values: ~values.isnan()), VALUES, _filled(math.nan)),
    "classes as floats": (
        partial(_over, lambda values: values > 0),
        ONES[LABELS],
        ONES[LABELS].index_fill(0, torch.tensor([0, 1, 5]), 1),
    ),
    "lengths": (
        _over_lengths,
        (VALUES, torch.full((SAMPLES,), 3)),
        (VALUES, torch.tensor([5, 5, 5, 5, 1, 2, 3, 4])),
    ),
    "a label of 255": (
        _over_below_255,
        LABELS.byte(),
        torch.where(UNEQUAL > 0, LABELS, 255).byte(),
    ),
    "weights": (_by_mask, (LABELS, torch.ones(SAMPLES)), (LABELS, torch.linspace(0.1, 2, SAMPLES))),
}


@pytest.mark.covering(every=2, first=1)
@pytest.mark.parametrize(("loss_fn", "first", "later"), LATER.values(), ids=LATER)
def test_a_later_batch_of_unequal_numbers_is_compared_again(
    loss_fn: Loss, first: Any, later: Any
) -> None:
    with logical_devices(2):
        step = _flow(_classifier()).train_step(loss_fn)
        step(_inputs(), first, chunks=2)
        with pytest.raises(BatchError, match=r"weigh=f"):
            step(_inputs(), later, chunks=2)


def _mean_over_boxes(output: Tensor, target: list[dict[str, Tensor]]) -> Tensor:
    each = [
        functional.cross_entropy(row.expand(len(one["labels"]), -1), one["labels"], reduction="sum")
        for row, one in zip(output, target, strict=True)
    ]
    count = sum(len(one["labels"]) for one in target)
    return torch.stack(each).sum() / count


def test_a_later_list_of_targets_of_unequal_lengths_is_compared_again() -> None:
    """A detector's loss is a mean over boxes, of which each image has its own number."""
    first, later = (
        [{"labels": torch.arange(count) % CLASSES} for count in counts]
        for counts in ([2] * SAMPLES, [1, 2, 1, 2, 3, 4, 3, 4])
    )
    with logical_devices(2):
        options = BatchOptions(target="items")
        step = _flow(_classifier()).train_step(_mean_over_boxes, batch_options=options)
        step(_inputs(), first, chunks=2)
        with pytest.raises(BatchError, match=r"weigh=f"):
            step(_inputs(), later, chunks=2)


def test_a_later_batch_is_compared_again_if_the_model_returns_what_counts() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, CLASSES)

        def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
            return self.head(self.embed(words)), words != 0

    def loss_fn(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return _by_mask(output[0], (target, output[1]))

    with logical_devices(2):
        step = _flow(Masked()).train_step(loss_fn)
        step(LABELS, LABELS, chunks=2)
        with pytest.raises(BatchError, match=r"weigh=f"):
            step(LABELS * (UNEQUAL > 0), LABELS, chunks=2)


def _moved(target: Any) -> Any:
    """Return a target on an accelerator: a stand-in for one."""
    return tuple(map(_moved, target)) if isinstance(target, tuple) else target.to("cpu:1")


@pytest.mark.covering(every=2)
@pytest.mark.parametrize(("loss_fn", "first", "later"), LATER.values(), ids=LATER)
def test_labels_on_an_accelerator_are_read_one_batch_late(
    loss_fn: Loss, first: Any, later: Any
) -> None:
    """The host would have to wait for the accelerator to read them at once."""
    with logical_devices(2):
        step = _flow(_classifier()).train_step(loss_fn)
        for target in (first, first, later):
            step(_inputs(), _moved(target), chunks=2)
        step(_inputs(), _moved(first), chunks=2)  # equal numbers are right
        with pytest.raises(BatchError, match=r"weigh=f"):
            step(_inputs(), _moved(later), chunks=2)


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("index", [-100, 0])
def test_torchs_own_mean_is_right_for_every_batch_on_an_accelerator(index: int) -> None:
    model = _classifier()
    targets = [torch.full((SAMPLES,), 1), torch.tensor([1, 3, 2, 4, 3, index, index, index])]

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target, ignore_index=index)

    with logical_devices(2):
        flow = _flow(model)
        for loss in (loss_fn, nn.CrossEntropyLoss(ignore_index=index)):
            step = flow.train_step(loss)
            for target in targets:
                want = loss_fn(_unsplit(model, _inputs()), target)
                got = step(_inputs(), _moved(target), chunks=2)
                torch.testing.assert_close(got.cpu(), want.detach())


def test_labels_of_a_models_own_loss_are_read_one_batch_late() -> None:
    torch.manual_seed(0)
    with logical_devices(2):
        flow = _flow(_Labelled(is_trained=True).double())
        even, odd = _labels(*range(SAMPLES)), _labels(0, 1, 2, 3, 4)
        for labels in (even, even, odd):
            flow(_inputs(), _moved(labels), chunks=2)
        with pytest.raises(BatchError, match=r"weigh=lambda"):
            flow(_inputs(), _moved(odd), chunks=2)


def test_the_declaration_that_a_refusal_names_gives_the_loss_of_the_batch() -> None:
    model, known = _classifier(), BatchOptions(weigh=lambda _, target: target >= 0)
    with logical_devices(2):
        step = _flow(model).train_step(_mean_over_known, batch_options=known)
        for target in (EQUAL, UNEQUAL):
            want = _mean_over_known(_unsplit(model, _inputs()), target)
            torch.testing.assert_close(step(_inputs(), target, chunks=2).cpu(), want.detach())


def _unsplit(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the result of a copy of the model that is on no device of a flow."""
    other = _classifier()
    other.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    result: Tensor = other(inputs)
    return result


def test_a_kind_of_batches_is_compared_once_for_each_kind_of_inequality() -> None:
    calls = 0

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return functional.cross_entropy(output, target, reduction="none").mean()

    with logical_devices(2):
        step = _flow(_classifier()).train_step(loss_fn)
        step(_inputs(), torch.arange(SAMPLES) % CLASSES, chunks=2)
        before = calls
        for seed in range(4):
            step(_inputs(), torch.randint(1, CLASSES, (SAMPLES,)).clamp(min=1 - seed % 2), chunks=2)
        # a compared step runs the loss on the whole batch and twice on each part
        assert calls - before <= 4 * 2


def test_a_loss_that_agrees_by_chance_is_seen_by_its_gradient() -> None:
    """Every sample has the same loss, as in a model that knows nothing, so that each mean over some
    is equal."""

    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(self.body(x))
            return result

    with logical_devices(2):
        step = _flow(Same().double()).train_step(_mean_over_known)
        with pytest.raises(BatchError, match=r"the gradient of the loss of a batch .*weigh=f"):
            step(_inputs(), UNEQUAL, chunks=2)


def _noisy(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(functional.dropout(output + torch.randn_like(output)), target)


def test_a_loss_that_draws_random_numbers_is_compared_with_the_same_numbers() -> None:
    labels = torch.arange(SAMPLES) % CLASSES
    with logical_devices(2):
        flow = _flow(_classifier())
        assert flow.train_step(_noisy)(_inputs(), labels, chunks=2) > 0
        with pytest.raises(BatchError, match=r"weigh=f"):
            flow.train_step(lambda output, target: _noisy(output, target) * len(target))(
                _inputs(), labels, chunks=2
            )


def test_a_value_that_is_a_python_number_is_refused_as_it_would_not_change() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Any:
        loss = functional.cross_entropy(output, target)
        return loss, {"entropy": loss.item()}

    with logical_devices(2):
        step = _flow(_classifier()).train_step(loss_fn)
        with pytest.raises(InputError, match=r"'entropy' as a Python number.*as a tensor"):
            step(_inputs(), torch.arange(SAMPLES) % CLASSES, chunks=2)


class _Labelled(nn.Module):
    """A model that computes its own loss, as language models do that are given labels."""

    def __init__(self, is_trained: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
        if not is_trained:  # all labels are equally likely
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.body(x))
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


def _labels(*counted: int) -> Tensor:
    """Labels of which only those of these samples count."""
    return torch.tensor([1 if sample in counted else -100 for sample in range(SAMPLES)])


@pytest.mark.parametrize("is_trained", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_models_own_loss_is_compared_on_all_samples(is_trained: bool) -> None:
    """The first four samples have equal numbers of labels in each half, the batch does not."""
    labels = _labels(0, 1, 2, 3, 4)
    torch.manual_seed(0)
    with logical_devices(2):
        flow = _flow(_Labelled(is_trained).double())
        flow(_inputs(), _labels(*range(SAMPLES)), chunks=2)
        with pytest.raises(BatchError, match=r"weigh=lambda"):
            flow(_inputs(), labels, chunks=2)
        step = flow.train_step(lambda output, _: output["loss"])
        with pytest.raises(BatchError, match=r"weigh=lambda"):
            step((_inputs(), labels), None, chunks=2)
        weighed = BatchOptions(weigh=lambda inputs, _: inputs[1] != -100)
        step = flow.train_step(lambda output, _: output["loss"], batch_options=weighed)
        loss = step((_inputs(), labels), None, chunks=2)
    if not is_trained:
        assert float(loss) == pytest.approx(math.log(CLASSES))


class _Counting(nn.Module):
    """A model that changes with each call of it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.calls = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.head(self.body(x)) * self.calls
        return result


def test_a_model_that_counts_its_calls_is_not_cut() -> None:
    """The second micro-batch finds what the first has left, as the batch does not."""
    with logical_devices(2):
        flow = _flow(_Counting().double())
        with pytest.raises(BatchError, match=r"chunks=1"):
            flow(_inputs(), chunks=2)


class _Branching(nn.Module):
    """A model whose result comes from another layer, on another device, in every second call."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.calls = nn.Linear(WIDTH, CLASSES), nn.Linear(CLASSES, CLASSES), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.body(x)
        return self.head(result) if self.calls % 2 else result


def test_losses_of_micro_batches_on_two_devices_are_added() -> None:
    with logical_devices(2):
        flow = _flow(_Branching().double())
        step = flow.train_step(
            lambda output, _: output.square().mean(), batch_options=BatchOptions(verify=False)
        )
        model = flow.module
        assert isinstance(model, _Branching)
        loss = step(_inputs(), None, chunks=2)
        half = model.body.weight.detach().cpu(), model.body.bias.detach().cpu()
        results = [functional.linear(part, *half) for part in _inputs().chunk(2)]
        last = 0 if model.calls % 2 == 0 else 1
        results[last] = functional.linear(
            results[last], model.head.weight.detach().cpu(), model.head.bias.detach().cpu()
        )
        want = torch.stack([result.square().mean() for result in results]).mean()
        torch.testing.assert_close(loss.cpu(), want)


class _State(nn.Module):
    """A layer that takes a state whose samples lie along the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(WIDTH, 8, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        result: Tensor = self.head(self.rnn(x, state)[0])
        return result


def test_a_refusal_names_the_dimension_of_an_input_that_lies_elsewhere() -> None:
    model = _State().double()
    x, state = (
        torch.randn(4, 3, WIDTH, dtype=torch.float64),
        torch.randn(1, 4, 8, dtype=torch.float64),
    )
    with torch.no_grad(), logical_devices(2):
        want = model(x, state)
        flow = _flow(model)
        with pytest.raises(
            BatchError, match=r"BatchOptions\(inputs=\{'state': 1\}\) gives the batch's results"
        ):
            flow(x, state, chunks=2)
        found = flow(x, state, chunks=2, batch_options=BatchOptions(inputs={"state": 1}))
        torch.testing.assert_close(found.cpu(), want)


class _Masked(nn.Module):
    """A sequence-first layer whose mask begins with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        h = self.body(x)
        result: Tensor = self.attention(h, h, h, key_padding_mask=padding)[0]
        return result


def test_a_refusal_keeps_the_dimension_that_was_declared_for_other_inputs() -> None:
    x, padding = torch.randn(5, 4, 8, dtype=torch.float64), torch.zeros(4, 5, dtype=torch.bool)
    with torch.no_grad(), logical_devices(2):
        flow = _flow(_Masked().double())
        with pytest.raises(
            BatchError, match=r"BatchOptions\(inputs=\{'\*': 1, 'padding': 0\}\) gives"
        ):
            flow(x, padding, chunks=2, batch_options=BatchOptions(inputs=1))
