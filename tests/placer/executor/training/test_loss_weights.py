"""A loss that leaves labels out, or weighs them, trains in micro-batches as the unsplit model does
on a batch."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from splitting import scatter_layers
from torch import Tensor, nn
from torch.nn import functional

from placer import DataFlow
from placer.errors import InputError
from placer.executor.training.loss.loss_weights import Weighing
from placer.schema import BatchOptions
from placer.testing import logical_devices

N, LENGTH, CLASSES = 10, 3, 5
X = torch.linspace(-1, 1, N * LENGTH * 4, dtype=torch.float64).reshape(N, LENGTH, 4)
LABELS = torch.arange(N * LENGTH).reshape(N, LENGTH) % CLASSES
CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 1.0, 0.5, 9.0], dtype=torch.float64)


class Tagger(nn.Module):
    """Classes behind samples, as torch's losses take them; on request the hook path's."""

    def __init__(self, hooked: bool = False) -> None:
        super().__init__()
        self.first, self.last, self._hooked = nn.Linear(4, 6), nn.Linear(6, CLASSES), hooked

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.last(torch.tanh(self.first(x))).mT
        if self._hooked and logits.sum().item() == 0.0:
            logits = logits + 1
        return logits if labels is None else functional.cross_entropy(logits, labels)


def padded(value: int = -100) -> Tensor:
    """Labels of unlike numbers a sample; the first two have none."""
    labels = LABELS.clone()
    labels[:2] = value
    labels[4, 1:] = labels[7:, 2] = value
    return labels


def compared(
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Any,
    target: Any,
    chunks: int,
    hooked: bool = False,
    expected: Callable[[nn.Module], Tensor] | None = None,
    **options: Any,
) -> None:
    """The loss and gradients of a step beside those of the unsplit model."""
    torch.manual_seed(0)
    model = Tagger(hooked).double()
    whole = copy.deepcopy(model)
    with logical_devices(2):
        flow = DataFlow(model)
        scatter_layers(flow, 2)
        step = flow.train_step(loss_fn, **options)
        for _ in range(2):
            loss = step(inputs, target, chunks=chunks)
    theirs = loss_fn(whole(inputs), target) if expected is None else expected(whole)
    theirs.backward()
    torch.testing.assert_close(loss.cpu(), theirs.detach())
    for ours, other in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), other.grad)


LOSSES: dict[str, tuple[Callable[[Any, Any], Tensor], Callable[[], Tensor]]] = {
    "all": (nn.CrossEntropyLoss(), lambda: LABELS),
    "padded": (nn.CrossEntropyLoss(), padded),
    "other padding": (nn.CrossEntropyLoss(ignore_index=255), lambda: padded(255)),
    "class weights": (nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), padded),
    "smoothed": (nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.1), padded),
    "probabilities": (
        nn.CrossEntropyLoss(),
        lambda: functional.one_hot(LABELS, CLASSES).mT.double(),
    ),
}


@pytest.mark.covering
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("chunks", [1, 3, 5])
@pytest.mark.parametrize("hooked", [False, True])
def test_torchs_losses_of_labels_are_weighed_by_those_that_they_count(
    name: str, chunks: int, hooked: bool
) -> None:
    loss_fn, labels = LOSSES[name]
    compared(loss_fn, X, labels(), chunks, hooked)


@pytest.mark.covering
@pytest.mark.parametrize("length", [LENGTH, N])
@pytest.mark.parametrize("weight", [None, CLASS_WEIGHTS])
@pytest.mark.parametrize("hooked", [False, True])
def test_labels_of_a_sequence_first_target_are_counted_for_each_sample(
    length: int, weight: Tensor | None, hooked: bool
) -> None:
    """The steps counted labels along dimension 0, whatever the batch dimension was."""
    x = torch.linspace(-1, 1, length * N * 4, dtype=torch.float64).reshape(length, N, 4)
    labels = torch.arange(length * N).reshape(length, N) % CLASSES
    # The samples have 0, 1, 2, ... labels that do not count.
    steps = torch.arange(length).unsqueeze(1)
    labels[steps >= length - torch.arange(N) % length] = -100
    loss_fn = nn.CrossEntropyLoss(weight=weight)
    options = BatchOptions(inputs=1, target=1)
    compared(loss_fn, x, labels, 5, hooked, batch_options=options)


def test_a_label_a_sample_may_be_left_out_too() -> None:
    model = nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES), nn.LogSoftmax(1)
    ).double()
    whole, labels = copy.deepcopy(model), padded()[:, 2].contiguous()
    with logical_devices(2):
        flow = DataFlow(model)
        scatter_layers(flow, 2)
        loss = flow.train_step(nn.NLLLoss(weight=CLASS_WEIGHTS))(X[:, 0], labels, chunks=4)
    theirs = nn.NLLLoss(weight=CLASS_WEIGHTS)(whole(X[:, 0]), labels)
    theirs.backward()
    torch.testing.assert_close(loss.cpu(), theirs.detach())
    torch.testing.assert_close(model[0].weight.grad.cpu(), whole[0].weight.grad)


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("chunks", [2, 3, 5])
def test_a_loss_of_ones_own_is_weighed_as_one_says(chunks: int) -> None:
    def loss_fn(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        each = (output.mean(1) - target["wanted"]).square() * target["mask"]
        # a micro-batch may have none
        return each.sum() / target["mask"].sum().clamp(min=1.0)

    target = {"wanted": X[:, :, 0], "mask": (padded() != -100).double()}
    compared(loss_fn, X, target, chunks, weigh=lambda _, target: target["mask"].sum(1))


def test_a_batch_of_which_nothing_weighs_teaches_nothing() -> None:
    model = Tagger().double()
    before = copy.deepcopy(model.state_dict())
    with logical_devices(2):
        flow = DataFlow(model)
        scatter_layers(flow, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = flow.train_step(
            lambda logits, labels: functional.cross_entropy(logits, labels, reduction="sum"),
            optimizer,
            weigh=lambda inputs, labels: (labels >= 0).double().sum(1),
        )
        loss = step(X, torch.full_like(LABELS, -100), chunks=2)
    assert loss.item() == 0.0
    for name, tensor in before.items():
        assert torch.equal(model.state_dict()[name].cpu(), tensor), name


def test_a_model_that_computes_its_own_loss_is_weighed_by_the_labels_among_its_inputs() -> None:
    inputs = {"x": X, "labels": padded()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compared(
            lambda output, _: output,
            inputs,
            None,
            5,
            expected=lambda whole: whole(**inputs),
            weigh=lambda inputs, _: (inputs["labels"] != -100).sum(1),
        )


def test_a_function_of_torchs_loss_of_labels_is_weighed_by_those_that_it_counts() -> None:
    """Also after a first batch in which all samples have as many labels."""
    model = Tagger().double()
    whole = copy.deepcopy(model)

    def loss_fn(output: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return functional.cross_entropy(output, labels), {"largest": output.max()}

    with logical_devices(2), warnings.catch_warnings():
        warnings.simplefilter("error")
        flow = DataFlow(model)
        scatter_layers(flow, 2)
        step = flow.train_step(loss_fn, batch_options=BatchOptions(outputs={"largest": "max"}))
        for labels in (LABELS, padded()):
            loss, values = step(X, labels, chunks=5)
            expected, expected_values = loss_fn(whole(X), labels)
            torch.testing.assert_close(loss.cpu(), expected.detach())
            torch.testing.assert_close(values["largest"].cpu(), expected_values["largest"].detach())


@pytest.mark.parametrize("among_inputs", [True, False])
def test_labels_that_are_left_out_without_a_weight_are_told_once(among_inputs: bool) -> None:
    """As many are left out of each sample, so that the first batch shows nothing."""
    labels = LABELS.clone()
    labels[:, 0] = -100

    def loss_fn(output: Tensor, labels: Any) -> Tensor:
        if labels is None:
            return output
        apart = functional.cross_entropy(output, labels, reduction="none")
        return apart.sum() / (labels != -100).sum()

    inputs, target = ({"x": X, "labels": labels}, None) if among_inputs else (X, labels)
    flow = DataFlow(Tagger().double(), ["cpu:0", "cpu:1"])
    scatter_layers(flow, 2)
    step = flow.train_step(loss_fn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(inputs, target, chunks=1)
    with pytest.warns(UserWarning, match=r"labels of -100.*weigh="):
        step(inputs, target, chunks=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(inputs, target, chunks=5)


@pytest.mark.parametrize(
    ("weigh", "said"),
    [
        (
            lambda inputs, target: target,
            r"weigh gave a tensor of shape \(10, 3\).*each of the 10 samples",
        ),
        (lambda inputs, target: 3, "weigh gave.*int"),
        (lambda inputs, target: None, "weigh gave"),
        (lambda target: target, r"weigh\(inputs, target\) failed: TypeError"),
        (
            lambda inputs, target: target["mask"],
            r"weigh\(inputs, target\) failed: .*it receives the step's inputs and target",
        ),
    ],
)
def test_weights_that_are_none_of_samples_are_refused(weigh: Any, said: str) -> None:
    flow = DataFlow(Tagger().double(), ["cpu:0", "cpu:1"])
    scatter_layers(flow, 2)
    step = flow.train_step(nn.CrossEntropyLoss(), weigh=weigh)
    with pytest.raises(InputError, match=said):
        step(X, LABELS, chunks=2)


def test_a_weight_by_inputs_that_another_process_has_is_told_to_go_by_the_target() -> None:
    # it was told to be given those of the step, which it is not
    weighing = Weighing(
        nn.CrossEntropyLoss(), BatchOptions(weigh=lambda inputs, _: inputs["labels"].sum(1))
    )
    with pytest.raises(
        InputError, match=r"weigh\(None, target\) failed: TypeError.*give the labels as that"
    ):
        weighing.goals(None, LABELS, N, is_cut=True)


def test_what_is_no_function_weighs_nothing() -> None:
    flow = DataFlow(Tagger().double(), ["cpu:0", "cpu:1"])
    scatter_layers(flow, 2)
    with pytest.raises(InputError, match="weigh is"):
        flow.train_step(nn.CrossEntropyLoss(), weigh=3)  # type: ignore[arg-type]


def test_a_weighed_step_is_measured() -> None:
    flow = DataFlow(Tagger().double(), ["cpu:0", "cpu:1"])
    scatter_layers(flow, 2)
    step = flow.train_step(nn.CrossEntropyLoss())
    assert flow.measure(X, padded(), step=step, chunks=2).rows


def test_a_weighed_step_is_copied_and_pickled() -> None:
    flow = DataFlow(Tagger().double(), ["cpu:0", "cpu:1"])
    scatter_layers(flow, 2)
    step = flow.train_step(nn.CrossEntropyLoss())
    step(X, padded(), chunks=2)
    again = pickle.loads(pickle.dumps(step))
    torch.testing.assert_close(again(X, padded(), chunks=2), step(X, padded(), chunks=2))


class Spread(nn.Module):
    """A tagger whose logits have the classes last, for labels of any shape."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.head(self.first(x))
        return logits if labels is None else _mean_of_counted(logits, labels)


def _mean_of_counted(logits: Tensor, labels: Any) -> Tensor:
    if labels is None:
        return logits
    apart = functional.cross_entropy(logits.movedim(-1, 1), labels, reduction="none")
    return apart.sum() / (labels != -100).sum()


@pytest.mark.covering(every=3)
@pytest.mark.parametrize("among_inputs", [True, False])
@pytest.mark.parametrize(
    ("shape", "dim"), [((4,), 0), ((4, 3), 0), ((3, 4), 1), ((4, 3, 2), 0), ((3, 4, 2), 1)]
)
def test_the_advised_weights_of_labels_can_be_used_as_they_are(
    shape: tuple[int, ...], dim: int, among_inputs: bool
) -> None:
    torch.manual_seed(0)
    model = Spread().double()
    x = torch.randint(7, shape)
    labels = torch.randint(3, shape)
    # half of each micro-batch, so that the first batch shows nothing
    labels.movedim(dim, 0)[::2] = -100
    inputs, target = ({"x": x, "labels": labels}, None) if among_inputs else (x, labels)
    with logical_devices(2):
        flow = DataFlow(model)
        scatter_layers(flow, 2)
        options = BatchOptions(inputs=dim, target=dim)
        with pytest.warns(UserWarning, match="labels of -100") as warned:
            flow.train_step(_mean_of_counted, batch_options=options)(inputs, target, chunks=2)
        (text,) = re.findall(r"weigh=(lambda.*)\)$", str(warned[0].message))
        options = BatchOptions(inputs=dim, target=dim, weigh=eval(text))
        step = flow.train_step(_mean_of_counted, batch_options=options)
        labels.movedim(dim, 0)[-1] = -100
        labels.movedim(dim, 0)[0] = 1
        found = step(inputs, target, chunks=2)
    expected = _mean_of_counted(copy.deepcopy(model).to("cpu")(x), labels)
    torch.testing.assert_close(found.cpu(), expected)
