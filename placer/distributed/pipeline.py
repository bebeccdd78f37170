"""The user's interface of ``placer.distributed``: one process's part of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from placer import devices
from placer.capture import input_forms
from placer.capture.loss_functions import refuse_arrays
from placer.capture.pytrees import Structure, flatten_inputs
from placer.distributed.collective_errors import together
from placer.distributed.pipeline_head import Head
from placer.distributed.replicas import Pipelines
from placer.distributed.schedules import LibrarySchedule
from placer.distributed.stage import StageModule
from placer.distributed.state import checkpoint
from placer.distributed.state.partial_modules import Names
from placer.distributed.state.rank_weights import Weights
from placer.errors import InputError, PlacerError
from placer.executor.state.parameter_hooks import has_hooks, hooks_run_once

_OTHER = (
    "for a smaller last batch build a second pipeline from the same model, its example one "
    "micro-batch of that; or leave it out: DataLoader(drop_last=True)"
)


@dataclass(frozen=True)
class Shape:
    """The form that every batch must have.

    Attributes:
        positional: number of positional arguments of the model.
        keywords: the names of the keyword arguments, in the example's order.
        inputs: the structure of all arguments.
        shapes: of the flat inputs of this pipeline's part of a micro-batch.
        dims: the batch dimension of each; None without one.
        dtypes: of the flat inputs.
        samples: in a micro-batch, by pipeline.
        chunks: micro-batches in a batch.
        verify: whether the first batch's loss is compared with the loss of the whole batch.
    """

    positional: int
    keywords: tuple[str, ...]
    inputs: Structure
    shapes: tuple[tuple[int, ...], ...]
    dims: tuple[int | None, ...]
    dtypes: tuple[torch.dtype, ...]
    samples: tuple[int, ...]
    chunks: int
    verify: bool

    @property
    def sizes(self) -> list[int]:
        """The samples in each part of a batch, by micro-batch and pipeline."""
        return [*self.samples] * self.chunks


class Pipeline:
    """This process's stages, their schedule, and its weights.

    Attributes:
        stages: of this process, in order; more than one if the line visits each device repeatedly.
        schedule: the library's schedule of these stages. ``step`` runs it; callers that run it
            directly must update copies of tied weights themselves.
        module: the parameters and buffers that this process owns, under the model's names. Buffers
            and frozen parameters belong to every replica of a stage.
        device: of this process.
        chunks: micro-batches in a batch.
    """

    def __init__(
        self,
        stages: list[PipelineStage],
        schedule: LibrarySchedule,
        module: nn.Module,
        device: torch.device,
        weights: Weights,
        head: Head,
        shape: Shape,
        names: Names,
        group: dist.ProcessGroup | None,
        pipelines: Pipelines,
    ) -> None:
        self.stages = stages
        self.schedule = schedule
        self.module = module
        self.device = device
        self.chunks = shape.chunks
        self._weights, self._head, self._shape = weights, head, shape
        self._names, self._group, self._pipelines = names, group, pipelines
        self._parts = pipelines.parts(shape.chunks)
        self._frozen = [
            name for name, parameter in module.named_parameters() if not parameter.requires_grad
        ]
        self._failed = False
        self._seed = devices.own_seed(pipelines.own[0])
        self._verify = shape.verify and len(shape.sizes) > 1
        self._is_compared = not self._verify

    @property
    def stage(self) -> PipelineStage:
        """Return the first of this process's stages."""
        return self.stages[0]

    @property
    def is_first(self) -> bool:
        """Return whether this process receives the inputs."""
        return bool(self.stages[0].is_first)

    @property
    def is_last(self) -> bool:
        """Return whether this process receives the target, and has the loss or the outputs."""
        return bool(self.stages[-1].is_last)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters that this process owns, for its optimizer.

        Over all processes, each trained parameter occurs once: replicas of a stage divide them, and
        so the optimizer's state. New values reach the other replicas before the next step.
        """
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return the parameters that this process owns, with the model's names."""
        return self.module.named_parameters()

    def step(self, inputs: Any = None, target: Any = None) -> Tensor | None:
        """Run one batch forward and backward, accumulating gradients like ``loss.backward()``.

        Args:
            inputs: the batch, required where ``is_first``: one tensor, a tuple of positional or a
                dict of keyword arguments. Other processes may pass it or None. With replicas, each
                takes its samples of the whole batch.
            target: the target of the loss, where ``is_last``, with the batch in the first
                dimension; None if the loss needs none.

        Returns:
            The loss of the batch, detached, where ``is_last``; otherwise None.

        Raises:
            BatchError: if the loss of the batch differs from the combined losses of its
                micro-batches: in the first step, in all processes; in the first later step with
                unequal numbers of labels, where ``is_last``.
            InputError: if the pipeline was built without a loss, or an earlier step failed. Also in
                inference mode, if the batch differs from the example or requires a gradient, if a
                frozen parameter now requires one, and if the loss is not a number.
            StageError: if a layer or the loss failed.
        """
        if self.schedule._loss_fn is None:
            raise InputError(
                "this pipeline was built without a loss: give build(..., loss_fn=...) to train"
            )
        if torch.is_inference_mode_enabled():
            raise InputError(
                "inference mode makes no gradients: leave torch.inference_mode() for a training "
                "step"
            )
        self._refuse_unready()
        arguments = self._arguments(inputs)
        self._refuse_untold(arguments)
        losses: list[Tensor] = []
        goal = self._goals(target)
        with self._noted_failure():
            self._seed.set_on(self.device)
            # copies of tied weights follow the optimizer's last step
            self._weights.refresh()
            self._weights.begin()
            is_compared_here = self._verify and self._is_compared and self._head.has_other_labels()
            self._head.collect(is_compared_here or not self._is_compared)
            hooked = self.parameters() if len(self._parts) > 1 else ()
            with hooks_run_once(hooked), self._allocated(), torch.enable_grad():
                self.schedule.step(*arguments, target=goal, losses=losses, return_outputs=False)
            self._weights.reduce()
            self._weights.take_buffers()
            total = self._head.total(losses) if losses else None
        if not self._is_compared:
            with together(self._group, "combine the losses of micro-batches"):
                self._head.compare(total)
            self._head.collect(False)
            self._is_compared = True
        elif is_compared_here:
            # other processes do not have the target: they only observe that this one failed
            with self._noted_failure():
                self._head.compare(total)
            self._head.collect(False)
        return total

    @torch.no_grad()
    def forward(self, inputs: Any = None) -> Any:
        """Run one batch forward, without gradients.

        Args:
            inputs: the batch, where ``is_first``, as for ``step``.

        Returns:
            The model's result, where ``is_last``; otherwise None.

        Raises:
            InputError: if the pipeline was built for training, the batch differs from the example,
                or an earlier call failed.
            StageError: if a layer failed.
        """
        if self.schedule._loss_fn is not None:
            raise InputError(
                "this pipeline was built to train: build another without loss_fn to run forwards "
                "alone"
            )
        self._refuse_unready()
        arguments = self._arguments(inputs)
        made: list[Any] = []
        last = self.stages[-1].submod
        watch = last.register_forward_hook(lambda *call: made.append(_own(call[2], last)))
        try:
            with self._noted_failure():
                self._weights.refresh()
                self.schedule.step(*arguments, return_outputs=False)
                self._weights.take_buffers()
                return self._head.join(made) if self.is_last else None
        finally:
            watch.remove()

    __call__ = forward

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients of all processes so that their total norm is at most ``max_norm``.

        Every process must call it.

        Returns:
            The norm before, on this process's device.
        """
        gradients = [
            parameter.grad for parameter in self.parameters() if parameter.grad is not None
        ]
        norms = [_square(gradient.detach()) for gradient in gradients]
        total = (
            torch.stack(norms).sum()
            if norms
            else torch.zeros((), dtype=torch.float64, device=self.device)
        )
        # each process owns other parameters
        dist.all_reduce(total, group=self._group)
        norm = total.sqrt()
        for gradient in gradients:
            gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0).to(gradient.dtype))
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Return this process's part of the model's ``state_dict``, under the model's keys."""
        return self._state(self._weights.owned())

    def _state(self, tensors: Iterable[str]) -> dict[str, Any]:
        """Return the entries of tensors in the ``state_dict``, by their first names."""
        keys = {key for name in tensors for key in self._names.aliases.get(name, ())}
        return {key: item for key, item in self.module.state_dict().items() if key in keys}

    def full_state_dict(self, rank: int = 0) -> dict[str, Tensor] | None:
        """Return the whole model's ``state_dict`` on the CPU of one process.

        Every process must call it.

        Args:
            rank: of that process, in the group (default 0).

        Returns:
            In that process, the ``state_dict()`` of the unsplit model; elsewhere None.

        Raises:
            InputError: if there is no such process.
        """
        size = dist.get_world_size(self._group)
        if rank not in range(size):
            raise InputError(
                f"rank={rank!r} is not a process of this pipeline; give one from 0 to {size - 1}"
            )
        # the first pipeline sends what every replica has
        is_whole = self._pipelines.own[0] == 0 or dist.get_rank(self._group) == rank
        own = self._state(self._weights.owned(divided=not is_whole))
        return checkpoint.gather(own, self._names.saved, rank, self.device, self._group)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this process's part of the whole model's ``state_dict``.

        Args:
            state: with exactly the model's keys.

        Raises:
            InputError: if keys are missing or unknown, or a tensor has another shape. Nothing is
                loaded then.
        """
        checkpoint.take(self.module, state, self._names.saved)
        self._weights.empty = False

    def save(
        self,
        path: str | PathLike[str],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    ) -> None:
        """Write a checkpoint for any number of processes, or for the unsplit model.

        Every process must call it.

        Args:
            path: a folder that all processes can access.
            optimizer: one or several optimizers of this process's parameters, to save their state
                too.

        Raises:
            InputError: if it cannot be written.
        """
        checkpoint.save(self.module, self.state_dict(), path, optimizer, self._group)

    def load(
        self,
        path: str | PathLike[str],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    ) -> None:
        """Read a checkpoint of ``save``, written by any number of processes.

        Every process must call it.

        Args:
            path: the folder.
            optimizer: one or several optimizers of this process's parameters, to read their state
                too.

        Raises:
            InputError: if it cannot be read, or is of another model or optimizer.
        """
        checkpoint.load(self.module, path, optimizer, self._group)
        self._weights.empty = False

    def _refuse_unready(self) -> None:
        if self._failed:
            raise InputError(
                "a step of this pipeline failed, and what the processes sent one another for it "
                "would be taken for the next one's: end all processes, and start them again from a "
                "checkpoint"
            )
        if self._weights.empty:
            raise InputError(
                "the model was on meta and has no values here yet: call load(...) or "
                "load_state_dict(...) first"
            )
        if unset := self._weights.unset():
            raise InputError(
                f"buffer {unset!r} was on meta and is part of no state_dict, so that it has no "
                f"values: give it some with pipeline.module.get_buffer({unset!r}).copy_(...) in "
                "this process"
            )

    def _refuse_untold(self, arguments: Sequence[Tensor]) -> None:
        """Raise an InputError if an input or a frozen parameter now requires a gradient.

        The stages were built without these gradients.
        """
        self._weights.refuse_hooks()
        if any(tensor.requires_grad for tensor in arguments):
            raise InputError(
                "an input requires a gradient, and a pipeline over several processes gives inputs "
                "none: detach() it"
            )
        for name in self._frozen:
            if self.module.get_parameter(name).requires_grad:
                raise InputError(
                    f"parameter {name!r} required no gradient when the pipeline was built, so that "
                    "it would receive none: build a new pipeline from the changed model"
                )

    @contextmanager
    def _noted_failure(self) -> Iterator[None]:
        """Mark the pipeline as failed after an error: unreceived messages may be in flight."""
        try:
            yield
        except BaseException as error:
            size = dist.get_world_size(self._group)
            # a single process has no messages in flight, so it may go on
            self._failed = size > 1
            self._weights.restore()
            if self._failed and not isinstance(error, PlacerError):
                error.add_note(
                    f"in process {dist.get_rank(self._group)} of {size} of a pipeline; where a "
                    "connection was closed or a time ran out, another process failed or ended "
                    "first: see what it says"
                )
            raise

    def _arguments(self, inputs: Any) -> tuple[Tensor, ...]:
        """Return the flat batch, which the library splits along the first dimension."""
        if not self.is_first:
            return ()
        if inputs is None:
            raise InputError(
                "this process has the first stage: give step(inputs, ...) the batch here"
            )
        args, kwargs = input_forms.call_arguments(inputs)
        # keyword arguments may come in any order
        given = {name: kwargs[name] for name in self._shape.keywords if name in kwargs} | kwargs
        tensors, structure = flatten_inputs(args, given)
        if structure.key != self._shape.inputs.key:
            raise InputError(
                "the inputs are not nested as the example was, or have other numbers or flags; "
                f"give them as build was given the example: {self._shape.positional} positional "
                f"arguments and the keywords {', '.join(self._shape.keywords) or '(none)'}"
            )
        for tensor, dtype in zip(tensors, self._shape.dtypes, strict=True):
            # the next stage receives the example's dtype
            if tensor.dtype != dtype:
                raise InputError(
                    f"an input is of {tensor.dtype}, and the example's was of {dtype}; give both "
                    "alike"
                )
        return tuple(
            self._cut(*item)
            for item in zip(tensors, self._shape.shapes, self._shape.dims, strict=True)
        )

    def _cut(self, tensor: Tensor, shape: tuple[int, ...], dim: int | None) -> Tensor:
        """Return an input's own parts, consecutive along the first dimension.

        An input without a batch dimension is repeated for each micro-batch.
        """
        # an example of one sample does not show which inputs have a batch dimension
        count = self._pipelines.count
        along = 0 if dim is None and shape and count == 1 else dim
        wanted = shape
        if along is not None:
            sizes = self._shape.sizes if count > 1 else [shape[along]] * self.chunks
            wanted = (*shape[:along], sum(sizes), *shape[along + 1 :])
            if tuple(tensor.shape) == wanted:
                if along == 0 and count == 1:
                    return tensor.contiguous()
                parts = tensor.split(sizes, along)  # type: ignore[no-untyped-call]
                return torch.cat([parts[number] for number in self._parts])
        if tuple(tensor.shape) == shape and dim is None:
            return tensor.expand(len(self._parts), *shape).reshape(-1, *shape[1:])
        wanted = shape if dim is None else wanted
        raise InputError(
            f"an input has shape {tuple(tensor.shape)}; {self.chunks} micro-batches like the "
            f"example make {wanted}; {_OTHER}"
        )

    def _goals(self, target: Any) -> Tensor | None:
        """Return the numbers of this process's parts, which the loss uses to select targets."""
        if not self.is_last:
            return None
        refuse_arrays(target)
        self._head.take(target)
        return torch.arange(len(self._parts))

    @contextmanager
    def _allocated(self) -> Iterator[None]:
        """Allocate zero gradients for weight-gradient passes, and remove the unused ones."""
        made: dict[int, nn.Parameter] = {}
        queues = [
            stage.submod.plan.deferred
            for stage in self.stages
            if isinstance(stage.submod, StageModule)
        ]
        reached = set[int]()

        def note(key: int, gradient: Tensor | None) -> None:
            if gradient is not None:  # None if the loss does not depend on it
                reached.add(key)

        for stage, queue in zip(self.stages, queues, strict=True):
            if queue is not None:
                queue.reached.clear()
                parameters = list(stage.submod.parameters())
                queue.idle = any(has_hooks(item) for item in parameters)
                made |= {
                    id(item): item
                    for item in parameters
                    if item.requires_grad and item.grad is None
                }
        watches = [
            item.register_hook(partial(note, key))  # type: ignore[no-untyped-call]
            for key, item in made.items()
        ]
        # zeros, because a weight-gradient pass accumulates in place
        for item in made.values():
            item.grad = torch.zeros_like(item)
        try:
            yield
        finally:
            for watch in watches:
                watch.remove()
        reached.update(*(queue.reached for queue in queues if queue is not None))
        for key in made.keys() - reached:
            made[key].grad = None


def _square(gradient: Tensor) -> Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return (torch.view_as_real(values) if values.is_complex() else values).double().square().sum()


def _own(output: Any, stage: nn.Module) -> Any:
    """Return the outputs, with copies of those that only passed through the stage.

    The library reuses the buffers that they were received in.
    """
    assert isinstance(stage, StageModule)
    plan = stage.plan
    passed = {parcel.value.name for parcel in plan.arrives}
    flat = [output] if isinstance(output, Tensor) else list(output)
    return [
        value.clone() if parcel.value.name in passed else value
        for parcel, value in zip(plan.leaves, flat, strict=True)
    ]
