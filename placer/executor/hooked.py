"""Running a model that cannot be captured, through forward hooks: micro-batches one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from placer.errors import InputError
from placer.executor.pipeline import to_device
from placer.executor.state.assignment import Assignment
from placer.graph import checkpoints
from placer.graph.alignment import Alignment, Arrivals
from placer.graph.structure import Structure, flatten
from placer.graph.trace import refuse_scripts


class HookPath:
    """The hooks of one model; there are none but while it runs, unless a backward pass will run modules again.

    Args:
        module: the model.

    Attributes:
        runs: whether the model runs through them at the moment.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._left: Arrivals | None = None
        self._standing: tuple[Alignment, Arrivals] | None = None
        self.runs = False

    def run(
        self, assignment: Assignment, parts: Sequence[Sequence[Any]], inputs: Structure, target: torch.device
    ) -> tuple[list[list[Any]], Structure, Any]:
        """Run every micro-batch.

        Args:
            assignment: the devices of the modules, whose state is there.
            parts: the flattened inputs of each.
            inputs: their structure.
            target: where results go.

        Returns:
            The flattened results of each, their structure, and what the last one was given, as the model left it.

        Raises:
            CaptureError: a module allows no hooks.
        """
        results: list[list[Any]] = []
        self.runs = True
        try:
            with self.standing(assignment):
                for part in parts:
                    args, kwargs = inputs.unflatten(part)
                    leaves, structure = flatten(self._module(*args, **kwargs))
                    results.append(to_device(leaves, target))
        finally:
            self.runs = False
        return results, structure, (args, kwargs)

    @contextmanager
    def standing(self, assignment: Assignment) -> Iterator[None]:
        """Whatever this thread runs of the model, a method or a part, runs where its modules are.

        Args:
            assignment: the devices of the modules, whose state is there.

        Raises:
            CaptureError: a module allows no hooks.
        """
        if self._standing is not None:
            alignment, arrivals = self._standing
            with alignment.resumed(), self._again(arrivals):
                yield
            return
        refuse_scripts(self._module, "the model runs through hooks")
        self.leave()
        alignment = Alignment()
        arrivals = Arrivals(self._places(assignment), alignment)
        self._standing = alignment, arrivals
        try:
            with self._again(arrivals), alignment:
                yield
        finally:
            self._standing = None
            if arrivals.stays:
                self._left = arrivals
            else:
                arrivals.remove()

    def paused(self) -> AbstractContextManager[None]:
        """In it operations are left as they are: those of a captured graph have all they need where they run."""
        return nullcontext() if self._standing is None else self._standing[0].paused()

    @property
    def stand(self) -> bool:
        """Whether this is in ``standing``."""
        return self._standing is not None

    def refuse_standing(self) -> None:
        """Raise an InputError in ``standing``, whose hooks know where modules were when it began."""
        if self.stand:
            raise InputError("layers move only when the flow is not applied: leave `with flow.applied():` first")

    def leave(self) -> None:
        """Take hooks away that a run left for its backward pass."""
        if self._left is not None:
            self._left.remove()
            self._left = None

    def _places(self, assignment: Assignment) -> dict[nn.Module, torch.device]:
        return {
            child: place
            for path, child in self._module.named_modules()
            if path and (place := assignment.of_path(path)) is not None
        }

    @contextmanager
    def _again(self, arrivals: Arrivals) -> Iterator[None]:
        """Let hooks stay on what runs under a checkpoint in this: the backward pass runs it once more."""
        again: list[str] = []
        try:
            with checkpoints.noticed(self._module, reentrant=True) as again:
                yield
        finally:
            arrivals.stay(map(self._module.get_submodule, again))
