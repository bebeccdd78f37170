"""Execution of models that cannot be captured, through forward hooks, one micro-batch at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import is_
from threading import Lock, RLock, get_ident
from typing import Any

import torch
from torch import nn

from placer import devices
from placer.capture.batch_dims.batch_layout import Part
from placer.capture.expert_stacks import stacks_in
from placer.capture.hook_path.device_alignment import Alignment, BorrowedWeights, ModuleHooks
from placer.capture.hook_path.module_trace import refuse_scripts
from placer.capture.pytrees import Structure, flatten, lazy_part
from placer.errors import InputError
from placer.executor.engine.fill_drain import to_device
from placer.executor.state.assignment import Assignment
from placer.executor.state.resting.resting_weights import Note, RestingWeights
from placer.schema.base import module_paths, paths_around

Standing = Callable[[], AbstractContextManager[Any]]
"""The context in which a model's modules run on their devices."""


class HookPath:
    """The hooks of one model, present only while it runs forward or again in a backward pass.

    Several threads may run it at once. They share the hooks, and each aligns its own operations.

    Args:
        module: the model.

    Attributes:
        resting: the weights that rest on the host; None without any.
        computes_on_host: whether a module that needs hooks is on the CPU, in the latest pass.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._by_thread: dict[int, Alignment] = {}
        self._hooks: ModuleHooks | None = None
        self.resting: RestingWeights | None = None
        self.computes_on_host = False
        self._changing = Lock()
        self._running: set[int] = set()
        self._thread_again = 0
        # autograd has a thread per device for backward passes
        self._turn_again = RLock()

    @property
    def runs(self) -> bool:
        """Return whether this thread currently runs the model through the hooks."""
        return get_ident() in self._running

    @property
    def _standing(self) -> Alignment | None:
        """Return the alignment of this thread's operations; None outside of ``standing``."""
        return self._by_thread.get(get_ident())

    @contextmanager
    def _run(self) -> Iterator[None]:
        """Note that the model runs in this thread."""
        self._running.add(get_ident())
        try:
            yield
        finally:
            self._running.discard(get_ident())

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
        with self._run(), self.standing(assignment):
            for part in parts:
                args, kwargs = part.inputs.unflatten(part.tensors)
                with self._reading():
                    leaves, structure = flatten(_at_once(self._module(*args, **kwargs)))
                place = target or self._latest(assignment)
                results.append(to_device(leaves, place))
                structures.append(structure)
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
        with self._run(), self._standing.resumed(), self._reading():
            return _at_once(self._module(*args, **kwargs))

    def alone(self) -> AbstractContextManager[Any]:
        """Let other threads run no part of the model with weights that rest on the host.

        While it runs, a module has views of a slot in the place of its parameters. A call that
        looks whether state was moved would take these for moved parameters.
        """
        return nullcontext() if self.resting is None else self.resting.lock

    def _reading(self) -> AbstractContextManager[None]:
        """Provide the weights that rest on the host to a pass of the model."""
        return nullcontext() if self.resting is None else self.resting.reading()

    def _borrowed(self) -> Mapping[nn.Module, BorrowedWeights]:
        return {} if self.resting is None else self.resting.by_module

    def noted(self, note: Note) -> AbstractContextManager[None]:
        """Note inside the block when modules begin and end to read weights that rest on the host.

        Args:
            note: called with an action and its device.
        """
        return nullcontext() if self.resting is None else self.resting.noted(note)

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
            renewal=partial(self._renewed, again or partial(self.standing, assignment), get_ident())
        )
        with self._aligned_by(alignment, assignment), alignment:
            yield

    @contextmanager
    def _aligned_by(
        self, alignment: Alignment, assignment: Assignment | None = None
    ) -> Iterator[None]:
        """Let the hooks note in ``alignment`` what this thread runs.

        The first thread adds the hooks to the modules, and the last one removes them.

        Args:
            alignment: of the thread's operations.
            assignment: the devices of the modules; None if the hooks are there.
        """
        thread = get_ident()
        with self._changing:
            if self._hooks is None:
                assert assignment is not None
                places = self._places(assignment)
                self._hooks = ModuleHooks(places, self._borrowed)
                self.computes_on_host = any(
                    devices.same(place, devices.HOST) for place in places.values()
                )
            self._hooks.alignments[thread] = self._by_thread[thread] = alignment
        try:
            yield
        finally:
            with self._changing:
                del self._by_thread[thread]
                assert self._hooks is not None
                self._hooks.forget(thread)
                if not self._by_thread:
                    self._hooks.remove()
                    self._hooks = None

    @contextmanager
    def _renewed(self, again: Standing, thread: int) -> Iterator[Alignment]:
        """Provide the hooks to a recomputation in a backward pass, one thread at a time.

        Args:
            again: the context of the recomputation if no hooks are present.
            thread: the number of the thread that ran the forward pass.
        """
        with self._turn_again, nullcontext() if self._by_thread else again():
            outer, self._thread_again = self._thread_again, get_ident()
            standing = self._standing
            lent = standing or self._by_thread.get(thread)
            lent = lent or next(iter(self._by_thread.values()), None)
            try:
                # after ``undo`` the layers are back home and need no alignment
                with nullcontext() if lent is None or standing else self._aligned_by(lent):
                    yield lent or Alignment()
            finally:
                self._thread_again = outer

    def paused(self) -> AbstractContextManager[None]:
        """Leave operations unchanged inside the block.

        The operations of a captured graph have their inputs on the right device already.
        """
        return nullcontext() if self._standing is None else self._standing.paused()

    @property
    def stand(self) -> bool:
        """Return whether ``standing`` is active in this thread."""
        return self._standing is not None

    @property
    def run_again(self) -> bool:
        """Return whether this thread recomputes in a backward pass."""
        return self._thread_again == get_ident()

    @property
    def are_elsewhere(self) -> bool:
        """Return whether only other threads are in ``standing``."""
        return bool(self._by_thread) and not self.stand and not self.run_again

    def refuse_standing(self) -> None:
        """Raise an InputError in ``standing``, whose hooks rely on unchanged devices."""
        if self.stand:
            raise InputError(
                "layers move only when the flow is not applied: leave `with flow.applied():` first"
            )

    def _places(self, assignment: Assignment) -> dict[nn.Module, torch.device]:
        """Return the modules that need hooks, with their devices.

        Inside a module all of whose parts are on its device, nothing has to arrive, except at parts
        with resting weights, and at parts that other modules call, too.
        """
        modules = {path: child for path, child in self._module.named_modules() if path}
        found = {path: place for path in modules if (place := assignment.of_path(path)) is not None}
        mixed = {
            above
            for path, place in found.items()
            for above in paths_around(path)
            if found.get(above, place) != place
        }
        uniform = found.keys() - mixed
        owners = Counter(child for one in self._module.modules() for child in one.children())
        resting = {path for layer in assignment.resting.values() for path in module_paths(layer)}
        resting.update(stacks_in(self._module, assignment.resting))
        return {
            modules[path]: place
            for path, place in found.items()
            if uniform.isdisjoint(paths_around(path))
            or owners[modules[path]] > 1
            or path in resting
        }


def _at_once(result: Any) -> Any:
    """Return a result; raise an InputError if code of the model is still to run for it."""
    if lazy := lazy_part(result):
        raise InputError(
            f"the model returns a {lazy}, whose code would run after the call and off the devices "
            "of its layers; return a list"
        )
    return result
