"""A micro-batch in flight through one stage in training, and the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from placer.capture.weight_grads.deferred import DeferredGradient, GradientQueue
from placer.devices import Mark, SideBranch
from placer.executor.engine.slot import Slot
from placer.executor.stage_errors import Trail
from placer.executor.training.optimizer.gradient_accumulation import Accumulation

Key = str | int
"""The name of a value, or the position of a tensor in the target."""


@dataclass
class Collected:
    """What the caller is given of a micro-batch in addition to its loss.

    Attributes:
        outputs: the model's results, flattened; None where nobody asks for them.
        values: the further values of the loss, by name.
    """

    outputs: list[Any] | None
    values: dict[str, Any]

    @classmethod
    def like(cls, other: Collected | None) -> Collected:
        """Return room for the same of another micro-batch."""
        if other is None:
            return cls(None, {})
        outputs = None if other.outputs is None else list(map(_room, other.outputs))
        return cls(outputs, {name: _room(value) for name, value in other.values.items()})

    @torch.no_grad()
    def take(self, other: Collected) -> None:
        """Copy what is in another one, on the stream in use."""
        pairs = [*zip(self.values.values(), other.values.values(), strict=True)]
        pairs += zip(self.outputs or (), other.outputs or (), strict=True)
        for mine, theirs in pairs:
            if isinstance(mine, Tensor):
                mine.copy_(theirs)


def _room(value: Any) -> Any:
    return torch.empty_like(value, requires_grad=False) if isinstance(value, Tensor) else value


@dataclass
class Head:
    """The loss, computed behind the last segment.

    Attributes:
        names: the values that the model returns.
        loss: from those, and the target of the micro-batch, to a number, and further values by
            name.
        total: sum over micro-batches of loss times weight.
        scale: the gradient of the loss; 1, or what a GradScaler says.
        dtype: of the loss, once it was computed.
        parameters: those that it reads itself, as a penalty of their size does.
        collects: whether the model's results are kept for the caller.
    """

    names: tuple[str, ...]
    loss: Callable[[list[Any], list[Any]], tuple[Tensor, dict[str, Any]]]
    total: Tensor
    scale: Tensor
    dtype: torch.dtype = torch.float32
    parameters: list[nn.Parameter] = field(default_factory=list)
    collects: bool = False


@dataclass(eq=False)
class TrainingSlot(Slot):
    """Room for one micro-batch in a stage, from its forward pass to its last one.

    Attributes:
        weight: of the micro-batch's loss in the batch's: its share of the samples.
        targets: static tensors of the loss's target, in the last stage.
        gradients: of each output, static: the sum of what its readers send.
        entering: the inputs and targets that a gradient goes back to.
        leaves: what the forward pass differentiates by, of these.
        roots: what the backward pass starts from.
        input_gradients: what the backward pass made for the values that entered.
        unreached: values that entered without getting a gradient; zeros stand for it.
        deferred: the weight gradients that the backward pass left to the weight-gradient pass.
        handed: static tensors of the stage before, on the same device, that wait for the gradients
            of values which come from it without a copy.
        landing: static tensors that input gradients are copied to: the gradients of ``handed``, and
            others where other passes work in the memory in which the gradients are made.
        fetched: marks behind the copies of the outputs.
        sent: marks behind the copies of the input gradients.
        collected: static, in a stage with a loss: what the caller is given of the micro-batch.
    """

    weight: float = 1.0
    targets: list[Any] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    entering: tuple[Key, ...] = ()
    leaves: dict[Key, Tensor] = field(default_factory=dict)
    roots: list[Tensor] = field(default_factory=list)
    input_gradients: dict[Key, Tensor] = field(default_factory=dict)
    unreached: frozenset[Key] = frozenset()
    deferred: GradientQueue = field(default_factory=GradientQueue)
    handed: dict[Key, Tensor] = field(default_factory=dict)
    landing: dict[Key, Tensor] = field(default_factory=dict)
    fetched: list[Mark] = field(default_factory=list)
    sent: list[Mark] = field(default_factory=list)
    collected: Collected | None = None

    def static(self, key: Key) -> Any:
        """Return the static tensor of an input or a target."""
        return self.inputs[key] if isinstance(key, str) else self.targets[key]


class NamedQueue(GradientQueue):
    """Weight gradients that are left for later, each with the name of its layer."""

    def __init__(
        self, trail: Trail, reach: Callable[[Tensor], None], accumulation: Accumulation
    ) -> None:
        super().__init__()
        self._trail = trail
        self._reach = reach
        self._accumulation = accumulation

    def put(self, addition: DeferredGradient) -> None:
        """Leave a weight gradient for later; see ``GradientQueue``."""
        self.append(replace(addition, layer=addition.layer or self._trail.layer))
        self._reached(addition.weights)

    def _reached(self, weights: Iterable[Tensor]) -> None:
        for weight in weights:
            if weight.requires_grad:
                self._reach(weight)

    def gradient(self, weight: Tensor) -> Tensor | None:
        """Return the tensor that gradients of a weight are added to; see ``GradientQueue``."""
        return self._accumulation.total(weight)

    def accumulate(self, weight: Tensor, gradient: Tensor) -> None:
        """Add to the gradient of a weight, now or with others; see ``Accumulation``."""
        total = self.gradient(weight)
        assert total is not None
        self._accumulation.add(total, gradient)


class AtOnce(NamedQueue):
    """Weight gradients that are not left for later, computed during the pass's other gradients.

    A product is added to the gradient at once, so that no further gradient takes memory.

    Args:
        trail: as for ``NamedQueue``, like the next two.
        reach: likewise.
        accumulation: likewise.
        branch: where they are computed.
    """

    def __init__(
        self,
        trail: Trail,
        reach: Callable[[Tensor], None],
        accumulation: Accumulation,
        branch: SideBranch,
    ) -> None:
        super().__init__(trail, reach, accumulation)
        self._branch = branch

    def put(self, addition: DeferredGradient) -> None:
        """Add it now, unless the pass is run without gradients of weights."""
        if self._accumulation.is_open:
            self._branch.run(partial(addition.run, self))
            self._reached(addition.weights)

    def accumulate(self, weight: Tensor, gradient: Tensor) -> None:
        """Add to the gradient of a weight, at once if it is computed during the pass."""
        if self._branch.is_apart:
            GradientQueue.accumulate(self, weight, gradient)
        else:
            super().accumulate(weight, gradient)
