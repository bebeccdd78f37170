"""The memory of a backward pass whose halves run apart, by input and by weight, as zero-bubble
schedules have them.

    bytes held
      ▲        ┌──┐  ┌──┐            ┌─┐  ┌─┐  half by weight: two operations at a time
      │     ┌──┘  └──┘  └─┐          │ │  │ │
      │  ┌──┘   deferred  └──────────┘ └──┘ └── gradients of results, until all halves by weight are over
      └──┴─ half by input ┴──── other passes ────▶ time

What was kept stays until both are over, so nothing of it is free for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from placer import devices
from placer.capture.weight_grads.splittable_ops import LINEAR, can_defer
from placer.devices.allocator.storage_watch import StorageLog, key_of, peak_bytes
from placer.profiler.backward_split.concurrent_passes import LANES
from placer.profiler.trial import Trial

Slices = tuple[int, tuple[int, ...]]
"""The bytes of a storage, and the positions of the reads whose gradients are slices of it."""


@dataclass(frozen=True)
class Halves:
    """The memory of the two halves, for one micro-batch, in bytes.

    Attributes:
        deferred: of each storage that the half by input makes and the half by weight needs.
        input_workspace_bytes: the most that the half by input holds beyond what was kept; those
            included.
        weights_workspace_bytes: the most that the half by weight holds beside them, of two
            operations like the largest.
        slices: of each storage of which gradients of reads are slices: its bytes, and the positions
            of these reads.
        deferred_writes: the positions of the writes whose gradients are among what is deferred.
    """

    deferred: tuple[int, ...] = ()
    input_workspace_bytes: int = 0
    weights_workspace_bytes: int = 0
    slices: tuple[Slices, ...] = ()
    deferred_writes: frozenset[int] = frozenset()


def measure_halves(trial: Trial) -> Halves:
    """Run the layer forwards and, in halves, backwards, and account for the memory of both.

    Args:
        trial: the layer; it must have run both ways before. If a trained parameter is sparse or a
            wrapper, its backward pass is not split.
    """
    if not all(map(devices.is_block, trial.parameters)):
        return Halves()
    try:
        return _measured(trial, again=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        # Some operations (those of torch.compile) refuse to run backwards twice: the half by weight
        # is not run then.
        return _measured(trial, again=False)


def _measured(trial: Trial, again: bool) -> Halves:
    log, waiting = StorageLog(trial.device, trial.state, trial.reads), _Waiting()
    trial.set_gradients(present=True)
    log.ignore(parameter.grad for parameter in trial.parameters if parameter.grad is not None)
    try:
        with log:
            with waiting:
                trial.forward()
            before = log.count
            log.begin_anew()
            gradients = trial.backward_by_input(waiting.edges, waiting.weights, again)
            input_bytes = log.peak_bytes()
        found = gradients[: len(waiting.edges)]
        keys = {
            key_of(gradient)
            for gradient in found
            if gradient is not None and gradient.layout == torch.strided
        }
        deferred = tuple(log.live[key] for key in keys if log.serial(key) > before)
        arrived = frozenset(place for place, key in trial.arrived.items() if key in keys)
        slices = _slices(log, trial.of_reads(gradients[len(found) :], waiting.weights))
        halves = zip(waiting.operations, found if again else [None] * len(found), strict=True)
        by_weight = [_weights_bytes(trial, log, *each) for each in halves]
        if devices.counts_bytes(trial.device):
            del gradients, found, halves
            input_bytes = _counted(trial, again)
        return Halves(deferred, input_bytes, LANES * max(by_weight, default=0), slices, arrived)
    finally:
        trial.set_gradients(present=False)


def _counted(trial: Trial, again: bool) -> int:
    """What the half by input holds where an allocator counts, without a log: see ``peak_bytes``."""
    waiting = _Waiting()
    with waiting:
        trial.forward()
    run = partial(trial.backward_by_input, waiting.edges, waiting.weights, again)
    return devices.peak_bytes(trial.device, run) or 0


def _slices(log: StorageLog, gradients: Mapping[int, Tensor]) -> tuple[Slices, ...]:
    parts: defaultdict[int, list[int]] = defaultdict(list)
    for position, gradient in gradients.items():
        if (
            gradient.layout == torch.strided
            and gradient.untyped_storage().nbytes() > gradient.nbytes
        ):
            parts[key_of(gradient)].append(position)
    live = log.live
    return tuple((live[key], tuple(positions)) for key, positions in parts.items() if key in live)


@dataclass(frozen=True)
class _Operation:
    """An operation whose weight gradients can wait.

    Attributes:
        edge: where gradients of its result come in.
        weights: that it has; the weight first.
        in_place_bytes: what its half by weight holds, where it adds to the gradient of the weight
            without making one; None where it makes one.
    """

    edge: GradientEdge
    weights: tuple[Tensor, ...]
    in_place_bytes: int | None


def _weights_bytes(
    trial: Trial, log: StorageLog, operation: _Operation, gradient: Tensor | None
) -> int:
    """What the half by weight of one operation holds."""
    if gradient is None or operation.in_place_bytes is not None:
        return operation.in_place_bytes or 0
    wanted = [weight for weight in operation.weights if weight.requires_grad]

    def run() -> Sequence[Tensor | None]:
        return torch.autograd.grad(
            [operation.edge], wanted, [gradient], retain_graph=True, allow_unused=True
        )

    log.begin_anew()
    return peak_bytes(trial.device, log, run)


class _Waiting(TorchFunctionMode):
    """Notes the operations whose weight gradients can wait.

    Attributes:
        operations: in the order in which they ran.
        weights: the ``id`` of each weight of theirs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []
        self.weights: set[int] = set()

    @property
    def edges(self) -> list[GradientEdge]:
        """Where gradients of the operations' results come in."""
        return [operation.edge for operation in self.operations]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if can_defer(func, args, kwargs):
            weights = tuple(weight for weight in args[1:3] if isinstance(weight, Tensor))
            self.weights.update(id(weight) for weight in weights)
            self.operations.append(
                _Operation(
                    get_gradient_edge(result), weights, _in_place_bytes(func, result, weights)
                )
            )
        return result


def _in_place_bytes(func: Any, result: Tensor, weights: Sequence[Tensor]) -> int | None:
    """A linear layer's half by weight adds to the gradient as it multiplies, where that is of the
    result's type.
    """
    if func is not LINEAR:
        return None
    weight = weights[0]
    return 0 if weight.dtype == result.dtype else weight.numel() * result.element_size()
