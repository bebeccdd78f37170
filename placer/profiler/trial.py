"""A layer with copies of its state and inputs, for repeated runs that leave the model unchanged."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from placer import devices
from placer.capture.batch_counters import added_together, batch_counters
from placer.capture.layers import Layer, Value
from placer.capture.weight_grads.deferred import DeferWeightGradients, GradientQueue, ImmediateQueue
from placer.devices.allocator.storage_watch import storage_of
from placer.utils.dtypes import is_differentiable


class Trial:
    """One layer on one device, for repeated forward and backward passes.

    Attributes:
        device: where it runs.
        state: copies of the layer's parameters and buffers.
        reads: copies of the values that it reads.
        writes: the results of the last forward pass.
        gradients: the results of the last backward pass: gradients of ``parameters``, then of the
            reads.
        parameters: the tensors of ``state`` that require a gradient.
        deferred: the weight gradients that the last backward pass left to ``accumulate_later``.
        arrived: by position among the writes, the storage of the gradient that came to it in the
            last ``backward_by_input``; weak references, since the pass may free it.
    """

    def __init__(
        self,
        layer: Layer,
        device: torch.device,
        state: Sequence[Tensor],
        reads: Sequence[Any],
        values: Mapping[str, Value],
        training: bool,
        mutated_reads: Collection[int] = (),
    ) -> None:
        self.device = device
        self.state = list(state)
        # clones, because a layer may change its reads in place
        self.reads = [read.detach().clone() if isinstance(read, Tensor) else read for read in reads]
        self.writes: tuple[Any, ...] = ()
        self.gradients: tuple[Tensor | None, ...] = ()
        self._function = layer.function
        self._counters = batch_counters(layer, self.state)
        self.deferred = GradientQueue()
        self.arrived: dict[int, ref[torch.UntypedStorage]] = {}
        self._training = training
        self._mutated = frozenset(mutated_reads)
        self._write_gradients: list[Tensor] | None = None
        if training:
            for name, read in zip(layer.reads, self.reads, strict=True):
                if (
                    isinstance(read, Tensor)
                    and values[name].requires_grad
                    and is_differentiable(read)
                ):
                    read.requires_grad_()
        self.parameters = [tensor for tensor in self.state if training and tensor.requires_grad]
        # Parameters come first: `backward_by_input` and `_forget_read_gradients` rely on this
        # order.
        self._leaves = self.parameters + [read for read in self._tensors() if read.requires_grad]

    @property
    def write_gradients(self) -> list[Tensor]:
        """Return random gradients of the writes, created once after a forward pass."""
        if self._write_gradients is None:
            self._write_gradients = [torch.randn_like(end) for end in self._ends()]
        return self._write_gradients

    def forward_in_halves(self) -> None:
        """Run forward, such that ``accumulate`` defers weight gradients to ``accumulate_later``."""
        with DeferWeightGradients(self.deferred):
            self.forward()

    def forward_adding(self) -> None:
        """Run forward, such that ``accumulate`` adds products directly to weight gradients."""
        with DeferWeightGradients(ImmediateQueue()):
            self.forward()

    def forward(self) -> None:
        """Run forward; in training, save tensors for the backward pass."""
        self.writes = self.gradients = ()
        self.deferred.clear()
        with torch.set_grad_enabled(self._training), added_together(self._counters):
            reads = [
                # autograd refuses to change a leaf in place, so such a read becomes the result of
                # an operation.
                _alias(read) if index in self._mutated and read.requires_grad else read
                for index, read in enumerate(self.reads)
            ]
            self.writes = tuple(self._function(self.device, self.state, reads))

    @property
    def flows(self) -> bool:
        """Return whether gradients flow through the layer, after a forward pass."""
        return bool(self._ends() and self._leaves)

    def backward(self) -> None:
        """Compute gradients of parameters and reads from random gradients of the writes."""
        if self.flows:
            self.gradients = torch.autograd.grad(
                self._ends(), self._leaves, self.write_gradients, allow_unused=True
            )

    def accumulate(self) -> None:
        """Run backward as training does, accumulating into the parameters' gradients."""
        if self.flows:
            self._forget_read_gradients()
            torch.autograd.backward(self._ends(), self.write_gradients, inputs=self._leaves)

    def accumulate_later(self) -> None:
        """Compute the weight gradients that were deferred after ``forward_in_halves``."""
        self.deferred.run()

    def accumulate_alone(self, again: bool = False) -> None:
        """Run backward with write gradients that are created on the way and freed after use.

        In a whole model, the gradients that the next layer sends have this lifetime.

        Args:
            again: retain the graph for another backward pass.
        """
        if self.flows:
            self._forget_read_gradients()
            # write gradients appear one by one during the pass, as from a next layer
            arrival = _Arrival.apply(*self._ends())  # type: ignore[no-untyped-call]
            torch.autograd.backward(
                arrival, torch.empty_like(arrival), retain_graph=again, inputs=self._leaves
            )

    def backward_by_input(
        self, edges: Sequence[GradientEdge], left_out: Collection[int], again: bool
    ) -> tuple[Tensor | None, ...]:
        """Run the input-gradient pass, without the deferred parameters.

        Args:
            edges: autograd edges of operations inside the layer.
            left_out: the ``id`` of each parameter whose gradient is deferred.
            again: retain the graph for another backward pass.

        Returns:
            The gradients that came to the edges, then the gradients of the other parameters and of
            the reads.
        """
        leaves = [get_gradient_edge(leaf) for leaf in self._leaves if id(leaf) not in left_out]
        wanted = [*edges, *leaves]
        if not self.flows or not wanted:
            return (None,) * len(wanted)
        arrival = _Arrival.apply(*self._ends())  # type: ignore[no-untyped-call]
        found = torch.autograd.grad(
            arrival, wanted, torch.empty_like(arrival), retain_graph=again, allow_unused=True
        )
        places = [place for place, write in enumerate(self.writes) if _is_end(write)]
        self.arrived = dict(zip(places, arrival.grad_fn.made, strict=True))
        return found

    def of_reads(
        self, gradients: Sequence[Tensor | None], left_out: Collection[int]
    ) -> dict[int, Tensor]:
        """Return the gradients of reads among gradients of leaves, by the read's position.

        Args:
            gradients: gradients of leaves, as ``backward_by_input`` returns them.
            left_out: as for ``backward_by_input``.
        """
        leaves = [leaf for leaf in self._leaves if id(leaf) not in left_out]
        found = {
            id(leaf): gradient
            for leaf, gradient in zip(leaves, gradients, strict=True)
            if gradient is not None
        }
        return {
            index: found[id(read)] for index, read in enumerate(self.reads) if id(read) in found
        }

    def set_gradients(self, present: bool) -> None:
        """Set the parameters' gradients to zeros or None, and drop deferred gradients."""
        self.deferred.clear()
        for leaf in self._leaves:
            leaf.grad = None
        for parameter in self.parameters if present else ():
            # a wrapper's class decides the type of its gradient
            is_wrapper = parameter.layout == torch.strided and not devices.has_own_memory(parameter)
            parameter.grad = None if is_wrapper else torch.zeros_like(parameter)

    def _ends(self) -> list[Tensor]:
        """Return the writes that receive gradients."""
        return [write for write in self.writes if _is_end(write)]

    def _forget_read_gradients(self) -> None:
        for leaf in self._leaves[len(self.parameters) :]:
            leaf.grad = None

    def _tensors(self) -> list[Tensor]:
        return [read for read in self.reads if isinstance(read, Tensor)]


def bring_state(layer: Layer, state: Mapping[str, Tensor], device: torch.device) -> list[Tensor]:
    """Return copies of a layer's parameters and buffers on a device.

    State on ``meta`` becomes random numbers.

    Args:
        layer: the layer.
        state: the model's state by name.
        device: the device of the copies.
    """
    known = devices.Known()
    brought = []
    for name in layer.state:
        tensor = state[name]
        if tensor.is_meta:
            made = partial(
                _random_state, device=device, is_parameter=isinstance(tensor, nn.Parameter)
            )
            copied = devices.rebuilt(tensor, made)
        else:
            copied = devices.copy(tensor, device, known)
        brought.append(copied.requires_grad_(tensor.requires_grad))
    return brought


def bring_input(value: Any, device: torch.device) -> Any:
    """Return a copy of a model input on the device; a random tensor for one on ``meta``.

    Values that are not tensors are returned unchanged.
    """
    if not isinstance(value, Tensor):
        return value
    if not value.is_meta:
        return devices.copy(value, device)
    if value.dtype == torch.bool:
        return torch.ones(value.shape, dtype=value.dtype, device=device)
    if not is_differentiable(value):
        return torch.zeros(value.shape, dtype=value.dtype, device=device)
    return torch.empty_like(value, device=device).copy_(torch.randn(value.shape, device=device))


def _random_state(tensor: Tensor, device: torch.device, is_parameter: bool) -> Tensor:
    """Return small random numbers: positive for buffers, which may be variances."""
    made = torch.empty_like(tensor, device=device)
    if not is_differentiable(tensor):
        return made.zero_()
    low = -0.02 if is_parameter else 0.01
    return made.copy_(torch.empty(tensor.shape, device=device).uniform_(low, 0.02))


def _alias(tensor: Tensor) -> Tensor:
    alias: Tensor = _Alias.apply(tensor)  # type: ignore[no-untyped-call]
    return alias


def _is_end(write: Any) -> bool:
    return isinstance(write, Tensor) and write.requires_grad


class _Arrival(torch.autograd.Function):
    """An autograd function whose backward pass creates gradients that nothing else references.

    Its forward pass does nothing. Each gradient is freed right after its use.
    """

    @staticmethod
    def forward(ctx: Any, *ends: Tensor) -> Tensor:
        ctx.device = ends[0].device
        ctx.likes = [torch.empty_like(end, device="meta") for end in ends]
        return torch.empty(0, device=ctx.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        made = tuple(torch.ones_like(like, device=ctx.device) for like in ctx.likes)
        ctx.made = [storage_of(gradient) for gradient in made]
        return made


class _Alias(torch.autograd.Function):
    """A tensor with the same memory and its own version counter, for in-place layers."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        # ``set_`` instead of a view: a view would share the version counter
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(
            tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]
