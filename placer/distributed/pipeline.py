"""What ``placer.distributed.build`` returns: one process's part of the pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from placer.capture import input_forms
from placer.capture.loss_functions import refuse_arrays
from placer.capture.pytrees import Structure, flatten_inputs
from placer.distributed.collective_errors import together
from placer.distributed.pipeline_head import Head
from placer.distributed.schedules import LibrarySchedule
from placer.distributed.stage import StageModule
from placer.distributed.state import checkpoint
from placer.distributed.state.partial_modules import Names
from placer.distributed.state.rank_weights import Weights, is_hooked
from placer.errors import InputError, PlacerError

_OTHER = (
    "for a smaller last batch build a second pipeline from the same model, its example one "
    "micro-batch of that; or leave it out: DataLoader(drop_last=True)"
)


@dataclass(frozen=True)
class Shape:
    """What every batch must be like.

    Attributes:
        positional: how many positional arguments the model is given.
        keywords: the names of the others, in the example's order.
        inputs: the structure of all of them.
        shapes: of the flat inputs of one micro-batch.
        dims: the dimension of each that is the batch; None where it has none.
        dtypes: of the same.
        samples: in a micro-batch.
        chunks: micro-batches in a batch.
    """

    positional: int
    keywords: tuple[str, ...]
    inputs: Structure
    shapes: tuple[tuple[int, ...], ...]
    dims: tuple[int | None, ...]
    dtypes: tuple[torch.dtype, ...]
    samples: int
    chunks: int


class Pipeline:
    """This process's stages, their schedule, and the weights that belong to it.

    Attributes:
        stages: of this process, in the order of the line; more than one where the line goes round
            more than once.
        schedule: the library's, over these stages. ``step`` drives it; who drives it alone brings
            copies of tied weights up to date himself.
        module: the parameters and buffers that belong to this process, under the model's own names.
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
        verify: bool = True,
    ) -> None:
        self.stages = stages
        self.schedule = schedule
        self.module = module
        self.device = device
        self.chunks = shape.chunks
        self._weights, self._head, self._shape = weights, head, shape
        self._names, self._group = names, group
        self._frozen = [
            name for name, parameter in module.named_parameters() if not parameter.requires_grad
        ]
        self._failed = False
        self._verify = verify and shape.chunks > 1
        self._is_compared = not self._verify

    @property
    def stage(self) -> PipelineStage:
        """The first of this process's stages; the only one where no device holds several."""
        return self.stages[0]

    @property
    def is_first(self) -> bool:
        """Whether this process is given the inputs."""
        return bool(self.stages[0].is_first)

    @property
    def is_last(self) -> bool:
        """Whether this process is given the target, and has the loss or the outputs."""
        return bool(self.stages[-1].is_last)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that belong to this process, for its optimizer: over all processes, each
        once.
        """
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same, with the model's names for them."""
        return self.module.named_parameters()

    def step(self, inputs: Any = None, target: Any = None) -> Tensor | None:
        """Run one batch forwards and backwards; gradients are added to the parameters', as
        ``loss.backward()`` does.

        Args:
            inputs: the batch, where ``is_first``: one tensor, a tuple of positional or a dict of
                keyword arguments. Other processes may give it too, or None.
            target: what the loss compares with, where ``is_last``, the batch first; None where the
                loss needs none.

        Returns:
            The loss of the batch, detached, where ``is_last``; else None.

        Raises:
            BatchError: the loss of the batch is not that of its micro-batches: in the first step,
                in all processes; in a later step whose micro-batches have, for the first time,
                unequal numbers of labels, where ``is_last``.
            InputError: the pipeline was built without a loss; it is inference mode; the batch is
                not like the example, or requires a gradient; a parameter trains that did not when
                the pipeline was built; the loss is no number; or an earlier step failed.
            StageError: a layer or the loss failed.
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
            self._weights.refresh()
            self._weights.begin()
            is_compared_here = self._verify and self._is_compared and self._head.has_other_labels()
            self._head.collect(is_compared_here or not self._is_compared)
            with self._allocated(), torch.enable_grad():
                self.schedule.step(*arguments, target=goal, losses=losses, return_outputs=False)
            self._weights.reduce()
        if not self._is_compared:
            with together(self._group, "take the losses of micro-batches for that of the batch"):
                self._head.compare(losses)
            self._head.collect(False)
            self._is_compared = True
        elif is_compared_here:
            # other processes do not know the target: they see that this one has failed
            with self._noted_failure():
                self._head.compare(losses)
            self._head.collect(False)
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else None

    @torch.no_grad()
    def forward(self, inputs: Any = None) -> Any:
        """Run one batch forwards, without gradients.

        Args:
            inputs: the batch, where ``is_first``, as for ``step``.

        Returns:
            What the model returns, where ``is_last``; else None.

        Raises:
            InputError: the pipeline was built for training; the batch is not like the example; or
                an earlier call failed.
            StageError: a layer failed.
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
        finally:
            watch.remove()
        return self._head.join(made) if self.is_last else None

    __call__ = forward

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all processes' gradients so that their norm together is at most ``max_norm``.

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
        # squares are summed over processes, since each owns different parameters
        dist.all_reduce(total, group=self._group)
        norm = total.sqrt()
        for gradient in gradients:
            gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0).to(gradient.dtype))
        return norm

    def state_dict(self) -> dict[str, Any]:
        """This process's part of the model's ``state_dict``, under the model's own keys."""
        return dict(self.module.state_dict())

    def full_state_dict(self, rank: int = 0) -> dict[str, Tensor] | None:
        """The whole model's ``state_dict``, on the CPU of one process. Every process must call it.

        Args:
            rank: of that process, in the group.

        Returns:
            There, what ``model.state_dict()`` of the unsplit model would be; elsewhere None.

        Raises:
            InputError: there is no such process.
        """
        size = dist.get_world_size(self._group)
        if rank not in range(size):
            raise InputError(
                f"rank={rank!r} is no process of this pipeline; give one from 0 to {size - 1}"
            )
        return checkpoint.gather(
            self.state_dict(), self._names.saved, rank, self.device, self._group
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this process's part from the whole model's ``state_dict``.

        Args:
            state: with all keys of the model; more or fewer are an error.

        Raises:
            InputError: keys are missing or not known, or a tensor has another shape. Nothing was
                loaded then.
        """
        checkpoint.take(self.module, state, self._names.saved)
        self._weights.empty = False

    def save(
        self,
        path: str | PathLike[str],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    ) -> None:
        """Write a checkpoint that any number of processes, or the unsplit model, can load. Every
        process must call it.

        Args:
            path: of a folder that all processes see.
            optimizer: one or several of this process's parameters, whose state is saved too.

        Raises:
            InputError: it cannot be written there.
        """
        checkpoint.save(self.module, path, optimizer, self._group)

    def load(
        self,
        path: str | PathLike[str],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    ) -> None:
        """Read a checkpoint that ``save`` wrote, on however many processes. Every process must call
        it.

        Args:
            path: of the folder.
            optimizer: one or several of this process's parameters, whose state is read too.

        Raises:
            InputError: it cannot be read, or is of another model or optimizer.
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
        """Gradients that would not come, as the stages were built without them, or in parts."""
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
                    "none would come back to it: build another pipeline from the model as it is now"
                )

    @contextmanager
    def _noted_failure(self) -> Iterator[None]:
        """After a failure there are messages under way that nobody has waited for."""
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
        """The flat batch, for the library to cut along the first dimension."""
        if not self.is_first:
            return ()
        if inputs is None:
            raise InputError(
                "this process has the first stage: give step(inputs, ...) the batch here"
            )
        args, kwargs = input_forms.call_arguments(inputs)
        # in any order
        given = {name: kwargs[name] for name in self._shape.keywords if name in kwargs} | kwargs
        tensors, structure = flatten_inputs(args, given)
        if structure.key != self._shape.inputs.key:
            raise InputError(
                "the inputs are not nested as the example was, or have other numbers or flags; "
                f"give them as build was given the example: {self._shape.positional} positional "
                f"arguments and the keywords {', '.join(self._shape.keywords) or '(none)'}"
            )
        for tensor, dtype in zip(tensors, self._shape.dtypes, strict=True):
            # what is sent on is received as what the example was
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
        """A batch as the library expects it, its micro-batches behind one another along the first
        dimension.

        What is no batch is repeated, once for each micro-batch.
        """
        # a batch of one sample says nothing of what is one
        along = 0 if dim is None and shape else dim
        wanted = shape
        if along is not None:
            wanted = (*shape[:along], shape[along] * self.chunks, *shape[along + 1 :])
            if tuple(tensor.shape) == wanted:
                parts = tensor.split(shape[along], along)  # type: ignore[no-untyped-call]
                return tensor.contiguous() if along == 0 else torch.cat(parts)
        if tuple(tensor.shape) == shape and dim is None:
            return tensor.expand(self.chunks, *shape).reshape(-1, *shape[1:])
        wanted = shape if dim is None else wanted
        raise InputError(
            f"an input has shape {tuple(tensor.shape)}; {self.chunks} micro-batches like the "
            f"example make {wanted}; {_OTHER}"
        )

    def _goals(self, target: Any) -> Tensor | None:
        """The numbers of the micro-batches, by which the loss finds its part of the target."""
        if not self.is_last:
            return None
        refuse_arrays(target)
        self._head.take(target)
        return torch.arange(self.chunks)

    @contextmanager
    def _allocated(self) -> Iterator[None]:
        """Where weight gradients are a pass of their own, they are added to what must be there, and
        goes if none is.
        """
        made: dict[int, nn.Parameter] = {}
        queues = [
            stage.submod.plan.deferred
            for stage in self.stages
            if isinstance(stage.submod, StageModule)
        ]
        reached = set[int]()

        def note(key: int, gradient: Tensor | None) -> None:
            if gradient is not None:  # the loss may not depend on it
                reached.add(key)

        for stage, queue in zip(self.stages, queues, strict=True):
            if queue is not None:
                queue.reached.clear()
                parameters = list(stage.submod.parameters())
                queue.idle = any(is_hooked(item) for item in parameters)
                made |= {
                    id(item): item
                    for item in parameters
                    if item.requires_grad and item.grad is None
                }
        watches = [item.register_hook(partial(note, key)) for key, item in made.items()]  # type: ignore[no-untyped-call]
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
    """The sum of squares."""
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return (torch.view_as_real(values) if values.is_complex() else values).double().square().sum()


def _own(output: Any, stage: nn.Module) -> Any:
    """An output that merely passed through the last stage is copied out of the buffer that it was
    received in.
    """
    assert isinstance(stage, StageModule)
    plan = stage.plan
    passed = {parcel.value.name for parcel in plan.arrives}
    flat = [output] if isinstance(output, Tensor) else list(output)
    return [
        value.clone() if parcel.value.name in passed else value
        for parcel, value in zip(plan.leaves, flat, strict=True)
    ]
