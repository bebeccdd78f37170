"""Running a model that cannot be captured, through forward hooks: micro-batches one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import is_
from threading import RLock, get_ident
from typing import Any

import torch
from torch import nn

from placer.capture.batch_dims.batch_layout import Part
from placer.capture.hook_path.device_alignment import Alignment, ModuleHooks
from placer.capture.hook_path.module_trace import refuse_scripts
from placer.capture.pytrees import Structure, flatten
from placer.errors import InputError
from placer.executor.engine.fill_drain import to_device
from placer.executor.state.assignment import Assignment

Standing = Callable[[], AbstractContextManager[Any]]
"""What is entered for a model to run where its modules are."""


class HookPath:
    """The hooks of one model; there are none but while it runs, forwards or again in a backward
    pass.

    Args:
        module: the model.

    Attributes:
        runs: whether the model runs through them at the moment.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._standing: Alignment | None = None
        self._thread = self._thread_again = 0
        # each device has a thread of its own for backward passes
        self._turn_again = RLock()
        self.runs = False

    def run(
        self, assignment: Assignment, parts: Sequence[Part], target: torch.device | None
    ) -> tuple[list[list[Any]], list[Structure], Any, torch.device]:
        """Run every micro-batch.

        Args:
            assignment: the devices of the modules, whose state is there.
            parts: the inputs of each.
            target: where results go; where the last module ran if None.

        Returns:
            The flattened results of each, their structures, what the last one was given, as the
            model left it, and where its results are.

        Raises:
            CaptureError: a module allows no hooks.
        """
        results: list[list[Any]] = []
        structures: list[Structure] = []
        self.runs = True
        try:
            with self.standing(assignment):
                for part in parts:
                    args, kwargs = part.inputs.unflatten(part.tensors)
                    leaves, structure = flatten(self._module(*args, **kwargs))
                    place = target or self._latest(assignment)
                    results.append(to_device(leaves, place))
                    structures.append(structure)
        finally:
            self.runs = False
        return results, structures, (args, kwargs), place

    def call(
        self,
        assignment: Assignment,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        target: torch.device | None,
    ) -> tuple[Any, torch.device]:
        """Run the model, in ``standing``, on the caller's own lists and objects.

        Args:
            assignment: the devices of the modules, whose state is there.
            args: what it takes.
            kwargs: the same.
            target: where results go, but for what it was given: a cache has its tensors where they
                are needed. Where the last module ran if None.

        Returns:
            What the model returns, and where its tensors are.
        """
        assert self._standing is not None
        self.runs = True
        try:
            with self._standing.resumed():
                result = self._module(*args, **kwargs)
        finally:
            self.runs = False
        place = target or self._latest(assignment)
        leaves, structure = flatten(result)
        given = set(map(id, flatten((args, kwargs))[0]))
        moved = [leaf if id(leaf) in given else to_device([leaf], place)[0] for leaf in leaves]
        return (result if all(map(is_, leaves, moved)) else structure.unflatten(moved)), place

    def _latest(self, assignment: Assignment) -> torch.device:
        """The device of the module that was entered last, as long as the model runs."""
        assert self._standing is not None
        return self._standing.place or assignment.default

    @contextmanager
    def standing(self, assignment: Assignment, again: Standing | None = None) -> Iterator[None]:
        """Whatever this thread runs of the model, a method or a part, runs where its modules are.

        Args:
            assignment: the devices of the modules, whose state is there.
            again: what is entered when a backward pass runs something of it again; this if None.

        Raises:
            CaptureError: a module allows no hooks.
        """
        if self._standing is not None:
            with self._standing.resumed():
                yield
            return
        refuse_scripts(self._module)
        alignment = Alignment(
            renewal=partial(self._renewed, again or partial(self.standing, assignment))
        )
        arrivals = ModuleHooks(self._places(assignment), alignment)
        self._standing, self._thread = alignment, get_ident()
        try:
            with alignment:
                yield
        finally:
            self._standing = None
            arrivals.remove()

    @contextmanager
    def _renewed(self, again: Standing) -> Iterator[Alignment]:
        """What a backward pass runs again finds the hooks of the pass before; one thread of
        autograd at a time.
        """
        with self._turn_again, nullcontext() if self.stand else again():
            outer, self._thread_again = self._thread_again, get_ident()
            try:
                # layers are at home if the flow was undone meanwhile
                yield self._standing or Alignment()
            finally:
                self._thread_again = outer

    def paused(self) -> AbstractContextManager[None]:
        """In it operations are left as they are: those of a captured graph have all they need where
        they run.
        """
        return nullcontext() if self._standing is None else self._standing.paused()

    @property
    def stand(self) -> bool:
        """Whether this is in ``standing``."""
        return self._standing is not None

    @property
    def run_again(self) -> bool:
        """Whether this thread runs something again in a backward pass."""
        return self._thread_again == get_ident()

    @property
    def are_elsewhere(self) -> bool:
        """Whether another thread is in ``standing``, and this one does not run a part of its
        backward pass.
        """
        return self.stand and self._thread != get_ident() and not self.run_again

    def refuse_standing(self) -> None:
        """Raise an InputError in ``standing``, whose hooks know where modules were when it began."""
        if self.stand:
            raise InputError(
                "layers move only when the flow is not applied: leave `with flow.applied():` first"
            )

    def _places(self, assignment: Assignment) -> dict[nn.Module, torch.device]:
        return {
            child: place
            for path, child in self._module.named_modules()
            if path and (place := assignment.of_path(path)) is not None
        }
