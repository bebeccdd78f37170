"""The state of a model on the devices of its layers: moved there, kept there, and restored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from placer import devices
from placer.capture.layers import LayerGraph
from placer.executor.segments import StateLookup
from placer.executor.state.assignment import Assignment
from placer.executor.state.clones import Clones
from placer.executor.state.replication import Replication
from placer.executor.state.state_copies import Copies
from placer.executor.state.state_moves import (
    Home,
    Whereabouts,
    bring_state,
    is_kept_on_host,
    keep_on_host,
    move_state,
    own_memory,
    rest,
    settle,
)
from placer.schema.base import Tier


class PlacedWeights:
    """A model's parameters and buffers, and the optimizers whose state moves with them.

    Args:
        module: the model.
        inference_only: let no parameter require a gradient until ``restore``.
        clone_places: devices that get a copy of all weights, so that none has to move; None to move
            them.
        disk_folder: for parameters that rest on the disk; None for the usual one.

    Attributes:
        module: the model.
        clones: of the weights; None if weights move.
        copies: of state, on devices that read it and do not own it.
        optimizers: whose state moves with the parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        inference_only: bool = False,
        clone_places: Sequence[torch.device] | None = None,
        disk_folder: str | PathLike[str] | None = None,
    ) -> None:
        self.module = module
        self.copies = Copies()
        self.optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._home = Home(module)
        self._moves = 0
        self._disk_folder = disk_folder
        # by name of a parameter that rests: its address, and where; and those that ``rest`` moved
        self._resting: dict[str, tuple[int, Tier]] = {}
        self._moved_to_rest: set[str] = set()
        # names of state that a graph has moved to its layers, and the devices of all state then
        self._settled: set[str] = set()
        self._places: list[torch.device] = []
        if inference_only:
            module.requires_grad_(False)
        self.clones = None if clone_places is None else Clones(module, clone_places)

    @property
    def version(self) -> tuple[int, int]:
        """Return a key that changes whenever state has moved or clones were copied again."""
        return self._moves, 0 if self.clones is None else self.clones.times_copied

    @contextmanager
    def moved(
        self,
        assignment: Assignment,
        optimizers: Sequence[torch.optim.Optimizer],
        clear_cache: bool,
    ) -> Iterator[None]:
        """Move the state to its devices, and move it back if the block fails.

        Clones stay where they are, and further devices get one.

        Args:
            assignment: the devices.
            optimizers: whose state moves too, now and later.
            clear_cache: whether to return cached device memory.
        """
        attributes = dict(vars(self))
        known = WeakSet([*self.optimizers, *optimizers])
        before = Whereabouts(self.module, known)
        covered = [] if self.clones is None else self.clones.places
        try:
            if self.clones is not None:
                self.clones.cover(assignment.devices)
            else:
                move_state(self.module, assignment.of_state, known)
                self.rest(assignment)
                for optimizer in optimizers:
                    if not is_kept_on_host(optimizer):
                        bring_state(optimizer)
                if clear_cache:
                    devices.release_cache()
                self._moves += 1
            vars(self).update(optimizers=known, _settled=set())
            yield
        except BaseException:
            vars(self).update(attributes)
            if self.clones is not None:
                self.clones.keep_only(covered)
            before.restore()
            raise

    def rest(self, assignment: Assignment) -> tuple[int, ...]:
        """Move the parameters that rest on the host to pinned memory or files, unless they rest.

        Args:
            assignment: the devices, and which parameters rest.

        Returns:
            A key that changes if one of these parameters was replaced by another.
        """
        if not assignment.resting:
            self._resting, self._moved_to_rest = {}, set()
            return ()
        own = dict(self.module.named_parameters())
        tiers = {name: assignment.tiers[layer] for name, layer in assignment.resting.items()}
        missing = {
            name: tier
            for name, tier in tiers.items()
            if self._resting.get(name) != (own[name].data_ptr(), tier)
        }
        if missing:
            moved = rest(self.module, missing, self._disk_folder)
            self._moved_to_rest = (self._moved_to_rest | moved) & tiers.keys()
        self._resting = {name: (own[name].data_ptr(), tier) for name, tier in tiers.items()}
        return tuple(id(own[name]) for name in tiers)

    def restore(self) -> None:
        """Restore the devices of all state, and all gradient flags."""
        self._home.restore(self.module, self.optimizers)
        for optimizer in filter(is_kept_on_host, self.optimizers):
            bring_state(optimizer)
        own_memory(self.module, self._moved_to_rest)
        self._resting, self._moved_to_rest = {}, set()
        vars(self).update(_moves=self._moves + 1, _settled=set())

    def bring_back(self, assignment: Assignment, state: Sequence[Tensor]) -> bool:
        """Move state back that another flow, or ``model.to``, has moved.

        Args:
            assignment: the devices.
            state: all parameters and buffers.

        Returns:
            Whether something had moved.
        """
        if self.clones is not None or self._places == _places(state):
            return False
        move_state(self.module, assignment.of_state, self.optimizers)
        self.rest(assignment)
        vars(self).update(_moves=self._moves + 1, _settled=set(), _places=_places(state))
        return True

    def settle(
        self,
        graph: LayerGraph,
        places: Sequence[torch.device],
        state: Sequence[Tensor],
        replication: Replication,
    ) -> None:
        """Move state that the map did not cover to its first layer's device.

        Args:
            graph: the layers.
            places: the device of each.
            state: all parameters and buffers.
            replication: the further devices that hold the same layers.
        """
        if self.clones is not None:
            return
        # state was moved from outside: verify every layer again
        if self._places != _places(state):
            vars(self).update(_moves=self._moves + 1, _settled=set())
        own = dict(self.module.named_parameters()) if self._resting else {}
        resting = {id(own[name]) for name in self._resting if name in own}
        settle(graph, places, self.optimizers, self._settled, replication, resting)
        self.note_places(state)

    def note_places(self, state: Sequence[Tensor]) -> None:
        """Remember the devices of all parameters and buffers, to notice moves from outside."""
        self._places = _places(state)

    def note_change(self) -> None:
        """Let everything that depends on ``version`` be made again."""
        self._moves += 1

    def refresh_clones(self) -> None:
        """Copy clones again if the weights have changed.

        Raises:
            InputError: if the model would be trained, since clones would not be.
        """
        if self.clones is not None:
            self.clones.refuse_training()
            self.clones.refresh()

    def lookup(self, graph: LayerGraph) -> StateLookup:
        """Return the lookup of the state that a graph's layers use.

        Args:
            graph: the layers. Their plain tensors are always the model's own.
        """
        clones = self.clones

        def lookup(name: str, place: torch.device) -> Tensor:
            if clones is None or name in graph.constants:
                return graph.state[name]
            return clones.get(name, place)

        return lookup

    def follow(self, optimizer: Any, on_host: bool = False) -> None:
        """Keep an optimizer's state on the devices of its parameters, or on the host, from now on.

        Args:
            optimizer: one that is not torch's, and so has no known state, is left alone.
            on_host: whether its state rests on the host.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            return
        if on_host:
            keep_on_host(optimizer)
        elif optimizer not in self.optimizers or is_kept_on_host(optimizer):
            bring_state(optimizer)
        self.optimizers.add(optimizer)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without copies and optimizers; of clones, their devices."""
        clones = None if self.clones is None else self.clones.places
        return {**vars(self), "clones": clones, "copies": None, "optimizers": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.copies = Copies()
        self.optimizers = WeakSet()  # training steps that are copied along register theirs
        self.clones = None if state["clones"] is None else Clones(self.module, state["clones"])


def _places(state: Sequence[Tensor]) -> list[torch.device]:
    return [*map(devices.location, state)]
