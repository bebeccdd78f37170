"""Execution of models that cannot be captured, through forward hooks, one micro-batch at a time."""

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
"""The context in which a model's modules run on their devices."""


class HookPath:
    """The hooks of one model, present only while it runs forward or again in a backward pass.

    Args:
        module: the model.

    Attributes:
        runs: whether the model currently runs through them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._standing: Alignment | None = None
        self._thread = self._thread_again = 0
        # autograd has a thread per device for backward passes
        self._turn_again = RLock()
        self.runs = False

    def run(
        self, assignment: Assignment, parts: Sequence[Part], target: torch.device | None
    ) -> tuple[list[list[Any]], list[Structure], Any, torch.device]:
        """Run every micro-batch.

        Args:
            assignment: the devices of the modules, whose state is there.
            parts: the inputs of each micro-batch.
            target: the device of results; None for the last module's device.

        Returns:
            The flattened results of each micro-batch, their structures, the arguments of the last
            one after in-place changes, and the device of its results.

        Raises:
            CaptureError: if a module does not allow hooks.
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
        """Run the model inside ``standing``, on the caller's own lists and objects.

        Args:
            assignment: the devices of the modules, whose state is there.
            args: positional arguments.
            kwargs: keyword arguments.
            target: the device of results. Tensors that were passed in, such as a cache, stay on
                their devices. None for the last module's device.

        Returns:
            The model's result, and the device of its tensors.
        """
        result = self.run_model(args, kwargs)
        place = target or self._latest(assignment)
        leaves, structure = flatten(result)
        given = set(map(id, flatten((args, kwargs))[0]))
        moved = [leaf if id(leaf) in given else to_device([leaf], place)[0] for leaf in leaves]
        return (result if all(map(is_, leaves, moved)) else structure.unflatten(moved)), place

    def run_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model inside ``standing``; its results stay where they are made.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
        """
        assert self._standing is not None
        self.runs = True
        try:
            with self._standing.resumed():
                return self._module(*args, **kwargs)
        finally:
            self.runs = False

    def _latest(self, assignment: Assignment) -> torch.device:
        """Return the device of the module that was entered last, while the model runs."""
        assert self._standing is not None
        return self._standing.place or assignment.default

    @contextmanager
    def standing(self, assignment: Assignment, again: Standing | None = None) -> Iterator[None]:
        """Run every part of the model that this thread calls on its modules' devices.

        Args:
            assignment: the devices of the modules, whose state is there.
            again: the context in which a backward pass runs a part again; this one by default.

        Raises:
            CaptureError: if a module does not allow hooks.
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
        """Provide the hooks to a recomputation in a backward pass, one thread at a time."""
        with self._turn_again, nullcontext() if self.stand else again():
            outer, self._thread_again = self._thread_again, get_ident()
            try:
                # after ``undo`` the layers are back home and need no alignment
                yield self._standing or Alignment()
            finally:
                self._thread_again = outer

    def paused(self) -> AbstractContextManager[None]:
        """Leave operations unchanged inside the block.

        The operations of a captured graph have their inputs on the right device already.
        """
        return nullcontext() if self._standing is None else self._standing.paused()

    @property
    def stand(self) -> bool:
        """Return whether ``standing`` is active."""
        return self._standing is not None

    @property
    def run_again(self) -> bool:
        """Return whether this thread recomputes in a backward pass."""
        return self._thread_again == get_ident()

    @property
    def are_elsewhere(self) -> bool:
        """Return whether another thread is in ``standing``, and this is not its recomputation."""
        return self.stand and self._thread != get_ident() and not self.run_again

    def refuse_standing(self) -> None:
        """Raise an InputError in ``standing``, whose hooks rely on unchanged devices."""
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
