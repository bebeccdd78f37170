"""Batches with other layouts and losses for placer.distributed; functions here travel to processes
by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ranked import gradients
from torch import Tensor, nn
from torch.nn import functional
from transplanted import captured_once

from placer import BatchOptions, distributed
from placer.errors import PlacerError

CHUNKS, SAMPLES, LENGTH, WIDTH, CLASSES = 2, 4, 3, 6, 5


class Case(NamedTuple):
    """A model of the layers ``body`` and ``head``, and its batch.

    Attributes:
        model: equal in every process.
        inputs: a tensor or a tuple of them.
        part: the first micro-batch of ``inputs``.
        target: for the loss.
        loss_fn: ``loss_fn(output, target)``.
        options: what is declared.
    """

    model: nn.Module
    inputs: Any
    part: Any
    target: Tensor
    loss_fn: Callable[[Any, Any], Tensor]
    options: BatchOptions


class _Chain(nn.Module):
    """Two layers, each on a device of its own."""

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x))


class _Recurrent(nn.Module):
    """An RNN without its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(WIDTH, WIDTH)  # (length, batch, features)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.rnn(x)[0]
        return result


def _token_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(0, 1))


def _in_batch_negatives(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output @ output.T, torch.arange(len(output)))


def _sequence_first(inputs: Any, target: Any) -> Case:
    model = _Chain(_Recurrent(), nn.Linear(WIDTH, CLASSES)).double()
    x = torch.randn(LENGTH, SAMPLES, WIDTH, dtype=torch.float64)
    goal = torch.randint(CLASSES, (LENGTH, SAMPLES))
    options = BatchOptions(inputs=inputs, target=target)
    return Case(model, x, x[:, : SAMPLES // CHUNKS].clone(), goal, _token_loss, options)


def sequence_first() -> Case:
    """Dimension 1 is the batch, of inputs, results and targets."""
    return _sequence_first(1, 1)


def sequence_first_and_batch_targets() -> Case:
    """Inputs (length, batch, features), of which the last is classified; targets (batch,)."""
    case = _sequence_first(1, 0)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output[-1], target)

    return case._replace(target=torch.randint(CLASSES, (SAMPLES,)), loss_fn=loss)


def sequence_first_undeclared() -> Case:
    """As many steps as samples, so that cutting along the wrong dimension fails by the values
    alone."""
    case = _sequence_first(0, "auto")
    x = torch.randn(SAMPLES, SAMPLES, WIDTH, dtype=torch.float64)
    return case._replace(
        inputs=x,
        part=x[: SAMPLES // CHUNKS].clone(),
        target=torch.randint(CLASSES, (SAMPLES, SAMPLES)),
    )


def _flat(loss_fn: Callable[[Any, Any], Tensor], options: BatchOptions) -> Case:
    model = _Chain(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)).double()
    x = torch.randn(SAMPLES, WIDTH, dtype=torch.float64)
    goal = torch.tensor([1, -100, -100, 2])
    return Case(model, x, x[: SAMPLES // CHUNKS].clone(), goal, loss_fn, options)


def _summed(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, reduction="sum")


def _over_a_constant(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output, target, reduction="sum") / 32


def _over_labels(output: Tensor, target: Tensor) -> Tensor:
    """A mean over labels, written by hand: torch's own would be seen to be weighted."""
    known = target >= 0
    each = functional.cross_entropy(output, target.clamp(min=0), reduction="none")
    return (each * known).sum() / known.sum()


def _labels(inputs: Any, target: Tensor) -> Tensor:
    return (target >= 0).double()


def sum_declared() -> Case:
    """A sum over samples."""
    return _flat(_summed, BatchOptions(reduction="sum"))


def sum_undeclared() -> Case:
    """A sum that is taken for a mean."""
    return _flat(_summed, BatchOptions())


def constant_declared() -> Case:
    """A sum over a constant, which is a sum."""
    return _flat(_over_a_constant, BatchOptions(reduction="sum"))


def weighed() -> Case:
    """A mean over labels, of which micro-batches have unequal numbers."""
    case = _flat(_over_labels, BatchOptions(weigh=_labels))
    return case._replace(target=torch.tensor([1, 3, -100, 2]))


def weighed_undeclared() -> Case:
    """The same, taken for a mean over samples."""
    case = _flat(_over_labels, BatchOptions())
    return case._replace(target=torch.tensor([1, 3, -100, 2]))


def contrastive() -> Case:
    """A loss over pairs of samples, which no cut batch has all of."""
    return _flat(_in_batch_negatives, BatchOptions())


def _declared(**options: Any) -> Case:
    return _flat(functional.cross_entropy, BatchOptions(**options))


def absent_input() -> Case:
    """A declaration for an input that the model does not have."""
    return _declared(inputs={"unknown": 0})


def absent_dimension() -> Case:
    """A dimension that no input has."""
    return _declared(inputs=5)


def absent_output() -> Case:
    """A declaration for a result that the model does not have."""
    return _declared(outputs={"unknown": 0})


def _places(case: Case) -> dict[str, str]:
    return {name: f"cpu:{index}" for index, (name, _) in enumerate(case.model.named_children())}


def _made(make: Callable[[], Case]) -> tuple[Case, dict[str, Any]] | None:
    """A case and what ``build`` is given beside it, in the two processes that run it."""
    group = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return None
    torch.manual_seed(0)
    case = make()
    return case, {"chunks": CHUNKS, "group": group, "batch_options": case.options}


def step(make: Callable[[], Case], schedule: str) -> dict[str, Any] | None:
    """Losses and gradients of two steps of two processes; what was raised by ``build`` or ``step``
    instead of them."""
    made = _made(make)
    if made is None:
        return None
    case, given = made
    losses: list[float] = []
    try:
        with captured_once((make, "batches")):
            pipeline = distributed.build(
                case.model, _places(case), case.part, case.loss_fn, schedule=schedule, **given
            )
        for _ in range(2):
            loss = pipeline.step(case.inputs, case.target)
            losses += [] if loss is None else [loss.item()]
    except PlacerError as error:
        return {"error": f"{type(error).__name__}: {error}", "losses": losses, "gradients": {}}
    return {"error": "", "losses": losses, "gradients": gradients(pipeline)}


def step_with_other_labels(make: Callable[[], Case], first: list[int]) -> dict[str, Any] | None:
    """Losses of a step with these labels and one with the case's, and the error of the second."""
    made = _made(make)
    if made is None:
        return None
    case, given = made
    with captured_once((make, "batches")):
        pipeline = distributed.build(case.model, _places(case), case.part, case.loss_fn, **given)
    losses: list[float] = []
    try:
        for target in (torch.tensor(first), case.target):
            loss = pipeline.step(case.inputs, target)
            losses += [] if loss is None else [loss.item()]
    except PlacerError as error:
        return {"error": f"{type(error).__name__}: {error}", "losses": losses}
    return {"error": "", "losses": losses}


def unsplit_step(make: Callable[[], Case]) -> tuple[float, dict[str, Tensor | None]]:
    """The loss of the whole batch, and the gradients of two steps."""
    torch.manual_seed(0)
    case = make()
    for _ in range(2):
        loss = case.loss_fn(case.model(case.inputs), case.target)
        loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), {name: parameter.grad for name, parameter in case.model.named_parameters()}


def forward(make: Callable[[], Case]) -> Tensor | None:
    """What the model returns, forwards alone."""
    made = _made(make)
    if made is None:
        return None
    case, given = made
    result = distributed.build(case.model.eval(), _places(case), case.part, **given)(case.inputs)
    return None if result is None else result.cpu()
