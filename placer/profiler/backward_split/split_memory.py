"""Memory of a backward pass split into input-gradient and weight-gradient passes.

Zero-bubble schedules run the two passes at different times.

    bytes held
      ▲        ┌──┐  ┌──┐            ┌─┐  ┌─┐  weight-gradient pass: two operations at a time
      │     ┌──┘  └──┘  └─┐          │ │  │ │
      │  ┌──┘   deferred  └──────────┘ └──┘ └── gradients of results, until the pass has ended
      └──┴ input-grad. pass ┴── other passes ──▶ time

Saved activations stay until both passes have ended, so none of their memory is freed in between.
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
from placer.capture.weight_grads.deferred import LINEAR, can_defer
from placer.devices.allocator.storage_watch import StorageLog, key_of, peak_bytes
from placer.profiler.backward_split.concurrent_passes import LANES
from placer.profiler.trial import Trial

Slices = tuple[int, tuple[int, ...]]
"""The bytes of a storage, and the positions of the reads whose gradients are slices of it."""


@dataclass(frozen=True)
class Halves:
    """Memory of the input-gradient and weight-gradient passes of one micro-batch, in bytes.

    Attributes:
        deferred: the storages that the input-gradient pass creates and the weight-gradient pass
            needs.
        input_grad_workspace_bytes: the peak of the input-gradient pass beyond saved activations,
            ``deferred`` included.
        weight_grad_workspace_bytes: the peak of the weight-gradient pass beyond these: two
            operations of the largest kind.
        slices: for each storage of which gradients of reads are slices, its bytes and the positions
            of these reads.
        deferred_writes: the positions of the writes whose gradients are in ``deferred``.
    """

    deferred: tuple[int, ...] = ()
    input_grad_workspace_bytes: int = 0
    weight_grad_workspace_bytes: int = 0
    slices: tuple[Slices, ...] = ()
    deferred_writes: frozenset[int] = frozenset()


def measure_halves(trial: Trial) -> Halves:
    """Run a layer's split backward pass and measure the memory of both parts.

    Args:
        trial: the layer, after an earlier forward and backward pass. The pass is not split if a
            trained parameter is sparse or a wrapper.
    """
    if not all(map(devices.is_block, trial.parameters)):
        return Halves()
    try:
        return _measured(trial, again=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        # Some operations (such as torch.compile's) cannot run backward twice; then the
        # weight-gradient pass is not measured.
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
            log.restart()
            # the graph is retained if the weight gradients are computed from it afterwards
            gradients = trial.backward_by_input(waiting.edges, waiting.weights, again)
            input_bytes = log.peak_bytes()
        found = gradients[: len(waiting.edges)]
        # gradients at the cut edges stay until the weight-gradient pass
        # Several edges may share one gradient storage, so a set counts each storage once.
        keys = {
            key_of(gradient)
            for gradient in found
            if gradient is not None and gradient.layout == torch.strided
        }
        deferred = tuple(log.live[key] for key in keys if log.serial(key) > before)
        arrived = frozenset(
            place
            for place, reference in trial.arrived.items()
            # an address alone could belong to a later storage
            if (storage := reference()) is not None and int(storage._cdata) in keys
        )
        slices = _slices(log, trial.of_reads(gradients[len(found) :], waiting.weights))
        halves = zip(waiting.operations, found if again else [None] * len(found), strict=True)
        by_weight = [_weights_bytes(trial, log, *each) for each in halves]
        if devices.counts_bytes(trial.device):
            # free the first run's tensors, so that they do not count in the second
            del gradients, found, halves
            input_bytes = _counted(trial, again)
        return Halves(deferred, input_bytes, LANES * max(by_weight, default=0), slices, arrived)
    finally:
        trial.set_gradients(present=False)


def _counted(trial: Trial, again: bool) -> int:
    """Return the peak of the input-gradient pass by the allocator's count, without a log.

    See ``storage_watch.peak_bytes``.
    """
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
    """An operation whose weight gradients can be deferred.

    Attributes:
        edge: the autograd edge that receives the gradient of its result.
        weights: its weights; the weight itself first, then the bias.
        in_place_bytes: the workspace of its weight-gradient computation if it accumulates in place;
            None if it creates a gradient.
    """

    edge: GradientEdge
    weights: tuple[Tensor, ...]
    in_place_bytes: int | None


def _weights_bytes(
    trial: Trial, log: StorageLog, operation: _Operation, gradient: Tensor | None
) -> int:
    """Return the peak memory of one operation's weight-gradient computation."""
    if gradient is None or operation.in_place_bytes is not None:
        return operation.in_place_bytes or 0
    wanted = [weight for weight in operation.weights if weight.requires_grad]

    def run() -> Sequence[Tensor | None]:
        return torch.autograd.grad(
            [operation.edge], wanted, [gradient], retain_graph=True, allow_unused=True
        )

    log.restart()
    return peak_bytes(trial.device, log, run)


class _Waiting(TorchFunctionMode):
    """A mode that collects the operations whose weight gradients can be deferred.

    Attributes:
        operations: in execution order.
        weights: the ``id`` of each of their weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[_Operation] = []
        self.weights: set[int] = set()

    @property
    def edges(self) -> list[GradientEdge]:
        """Return the autograd edges that receive the gradients of the results."""
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
    """Return the workspace of a linear layer's accumulating product.

    The product adds directly to a gradient of the result's dtype; otherwise it needs a copy. None
    for other operations.
    """
    if func is not LINEAR:
        return None
    weight = weights[0]
    return 0 if weight.dtype == result.dtype else weight.numel() * result.element_size()
