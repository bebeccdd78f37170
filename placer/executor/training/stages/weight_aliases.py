"""The parameters as the passes of a pipeline see them: aliases with gradients in fixed memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from placer import devices
from placer.capture.layers import LayerGraph
from placer.devices import Courier, Lane, Mark
from placer.executor.engine.weak_methods import weakly
from placer.executor.segments import Segment, read_back
from placer.executor.state.parameter_hooks import HOOKS, has_hooks
from placer.executor.state.replication import ONE_PIPELINE, Replication
from placer.executor.state.segment_state import mutated
from placer.executor.state.state_copies import Copies, Copy
from placer.executor.training.stages.replica_exchange import Exchange, Shared

Keep = Callable[[Tensor], bool]
"""Whether a parameter's gradient waits for the next batch's."""

_REQUIRES_GRAD = attrgetter("requires_grad")


def keep_none(parameter: Tensor) -> bool:
    """Return False: no gradient waits."""
    return False


@dataclass(frozen=True)
class _Total:
    """A trained parameter.

    Attributes:
        name: of the parameter.
        parameter: the model's own.
        gradient: on its device, in fixed memory: the sum over all passes and devices.
        aliases: the ids of its aliases.
    """

    name: str
    parameter: nn.Parameter
    gradient: Tensor
    aliases: frozenset[int]


_InUse = tuple[list[nn.Parameter], list[bool], list[nn.Parameter], list[devices.Address]]


@dataclass
class Weights:
    """Aliases of the model's parameters that the passes differentiate by.

    Their gradients stay in place, since a recorded pass adds to the same memory at every replay. An
    alias shares its parameter's storage but none of its history, so a loss that the user keeps does
    not disturb a recording. If layers on several devices use a parameter, each further device has a
    replica, see ``replica_exchange``.

    Attributes:
        aliases: by name and device.
        parameters: of the graph, by name.
        idle: parameters of the model that no layer of the graph uses; see ``leave_out``.
        exchange: the copies between the devices that use one parameter.
    """

    aliases: dict[tuple[str, torch.device], Tensor]
    parameters: dict[str, nn.Parameter]
    idle: list[nn.Parameter] = field(default_factory=list)
    exchange: Exchange = field(default_factory=Exchange)
    _reached: set[int] = field(default_factory=set)
    _handed: dict[int, ref[Tensor]] = field(default_factory=dict)
    _handles: list[Any] = field(default_factory=list)
    _copies: Copies = field(default_factory=Copies)
    _read: dict[int, Copy] = field(default_factory=dict)
    _buffers: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict)
    _followed: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _is_bound: bool = False
    _as_made: _InUse = field(default_factory=lambda: ([], [], [], []))

    @classmethod
    def from_graph(cls, graph: LayerGraph) -> Weights:
        """Return the weights of a graph's parameters; aliases are made when they are looked up."""
        return cls(
            {}, {name: item for name, item in graph.state.items() if isinstance(item, nn.Parameter)}
        )

    def leave_out(self, everything: Iterable[nn.Parameter]) -> None:
        """Let a batch leave no gradient of an earlier one with a parameter that it does not use.

        Args:
            everything: the model's parameters.
        """
        used = {id(self.parameters[name]) for name, _ in self.aliases}
        self.idle = [parameter for parameter in everything if id(parameter) not in used]

    def lookup(
        self, graph: LayerGraph, replication: Replication = ONE_PIPELINE, pipeline: int = 0
    ) -> Callable[[str, torch.device], Tensor]:
        """Return a function that gives the layers of a graph their state.

        Args:
            graph: the layers.
            replication: the pipelines.
            pipeline: the one whose layers these are. Beyond the first one, layers have copies of
                the model's buffers. What they write to these is their own.
        """
        changed, read = mutated(graph), read_back(graph.layers)
        # what layers change has to be the model's own
        copied = graph.constants - changed
        if pipeline:
            copied |= graph.state.keys() - changed

        def find(name: str, place: torch.device) -> Tensor:
            state = graph.state[name]
            if name not in self.parameters:
                if name in copied:
                    return self._plain(state, place)
                home = devices.location(state)
                own = replication.of(home)[pipeline]
                return (
                    state
                    if devices.same(own, home)
                    else self._buffer(name, state, own, name in read)
                )
            for (known, where), alias in self.aliases.items():
                if known == name and devices.same(where, place):
                    return alias
            return self._alias(name, place)

        return find

    def _plain(self, tensor: Tensor, place: torch.device) -> Tensor:
        """Return a plain tensor on a device."""
        if devices.same(devices.location(tensor), place):
            return tensor
        copy = self._copies.get(tensor, place)
        self._read[id(copy)] = copy
        return copy.tensor

    def _buffer(self, name: str, state: Tensor, place: torch.device, is_read: bool) -> Tensor:
        """Return a pipeline's own copy of a buffer that its layers write to.

        If they read it, too, every batch begins with the model's values.
        """
        if (name, place) not in self._buffers:
            self._buffers[name, place] = devices.copy(state, place)
            if is_read:
                self._followed.append((self._buffers[name, place], state))
        return self._buffers[name, place]

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the copies of plain tensors up to date, before a batch begins."""
        for copy in self._read.values():
            copy.refresh()
        for buffer, state in self._followed:
            devices.fill(buffer, state)

    def _alias(self, name: str, place: torch.device) -> Tensor:
        parameter = self.parameters[name]
        if not parameter.requires_grad and not self.owned(name, place):
            self.aliases[name, place] = self._plain(parameter, place)
            return self.aliases[name, place]
        alias = devices.move(parameter.detach(), place).requires_grad_(parameter.requires_grad)
        if parameter.requires_grad:
            if self.owned(name, place):  # others are given theirs by ``bind``
                alias.grad = torch.zeros_like(alias, requires_grad=False)
            self._handles.append(alias.register_post_accumulate_grad_hook(weakly(self._passed)))  # type: ignore[no-untyped-call]
        self.aliases[name, place] = alias
        return alias

    def bind(self, parts: Sequence[Segment], pieces: int) -> None:
        """Prepare the exchange between the devices of a parameter, before stages are made.

        Args:
            parts: the segments of all pipelines, one pipeline after the other, over these aliases.
            pieces: segments of one pipeline.
        """
        if self._is_bound:
            return
        self._is_bound = True
        # at once: before the next batch, the user may give a parameter data on another device
        self._as_made = self._in_use()
        keys = {id(alias): key for key, alias in self.aliases.items()}
        users: dict[tuple[str, torch.device], list[int]] = {}
        for index, part in enumerate(parts):
            for key in dict.fromkeys(
                keys[id(tensor)]
                for step in part.steps
                for tensor in step.state
                if id(tensor) in keys
            ):
                users.setdefault(key, []).append(index)
        travelling: list[Shared] = []
        for name, parameter in self.parameters.items():
            held = {place: alias for (known, place), alias in self.aliases.items() if known == name}
            if not parameter.requires_grad or all(self.owned(name, place) for place in held):
                continue
            readers = {place: users[name, place] for place in held}
            travelling.append(Shared(name, parameter, held, readers))
        self.exchange = Exchange.between(travelling, pieces)

    def reach(self, alias: Tensor) -> None:
        """Note that a backward pass, which may be recorded, gives this alias a gradient.

        Parameters of other aliases get no gradient.
        """
        self._reached.add(id(alias))

    def _passed(self, alias: Tensor) -> None:
        """Note that a backward pass came to an alias; compiled ones may bring no gradient."""
        if alias.grad is not None:
            self.reach(alias)

    def owned(self, name: str, place: torch.device) -> bool:
        """Return whether an alias is its parameter's own storage, not a replica."""
        return devices.same(devices.location(self.parameters[name]), place)

    def stale(self) -> bool:
        """Return whether a parameter has other data than its alias, or was frozen or unfrozen."""
        used, required, own, pointers = self._as_made
        return [*map(_REQUIRES_GRAD, used)] != required or devices.addresses(own) != pointers

    def hooked(self) -> str | None:
        """Return the name of a parameter with hooks of the user, or None.

        They would run when its gradient is made, which passes over aliases do not do.
        """
        if not any(chain.from_iterable(map(HOOKS, self.parameters.values()))):
            return None
        return next(
            (name for name, parameter in self.parameters.items() if has_hooks(parameter)), None
        )

    def _in_use(self) -> _InUse:
        """Return the parameters in use, at the time when the aliases were made.

        These are the parameters and whether they required gradients, then those with an alias of
        their own storage and the addresses of their data.
        """
        used = [self.parameters[name] for name, _ in self.aliases]
        own = [key for key in self.aliases if self.owned(*key)]
        return (
            used,
            [alias.requires_grad for alias in self.aliases.values()],
            [self.parameters[name] for name, _ in own],
            devices.addresses([self.aliases[key] for key in own]),
        )

    @cached_property
    def _totals(self) -> dict[torch.device, list[_Total]]:
        """The trained parameters and their gradients, by the device of the parameter."""
        gradients = self.exchange.gradients
        aliases: dict[str, dict[torch.device, Tensor]] = {}
        for (name, place), alias in self.aliases.items():
            aliases.setdefault(name, {})[place] = alias
        totals: dict[torch.device, list[_Total]] = {}
        for name, held in aliases.items():
            parameter = self.parameters[name]
            if not parameter.requires_grad:
                continue
            own = next((alias for place, alias in held.items() if self.owned(name, place)), None)
            gradient = (
                gradients[name] if name in gradients else own.grad if own is not None else None
            )
            assert gradient is not None
            one = _Total(name, parameter, gradient, frozenset(map(id, held.values())))
            totals.setdefault(devices.location(parameter), []).append(one)
        return totals

    @cached_property
    def _frozen(self) -> list[nn.Parameter]:
        """The parameters in use that are not trained."""
        used = (self.parameters[name] for name, _ in self.aliases)
        return [parameter for parameter in used if not parameter.requires_grad]

    @cached_property
    def homes(self) -> frozenset[torch.device]:
        """The devices of parameters that have replicas elsewhere."""
        return self.exchange.homes

    @torch.no_grad()
    def begin(
        self,
        lanes: Mapping[torch.device, Lane],
        begun: Mapping[torch.device, Mark],
        keep: Keep = keep_none,
        courier: Courier | None = None,
    ) -> None:
        """Make the gradients ready for a batch, and bring replicas up to date.

        Args:
            lanes: of each device.
            begun: by device, including ``homes``, when the parameters there are up to date.
            keep: whether the batch adds to the gradient that a parameter has; otherwise it begins
                at zero.
            courier: for the copies to replicas; None without replicas.
        """
        for parameter in chain(self.idle, self._frozen):
            if not keep(parameter):
                parameter.grad = None
        prepared: dict[torch.device, Mark] = {}
        fresh: set[str] = set()
        for place, totals in self._totals.items():
            lane = lanes.get(place)
            # A parameter's home may be a device without stages, which has no lane of its own.
            if lane is None:
                lane = Lane(place)
                lane.wait(begun[place])
            with lane:
                for one in totals:
                    if one.aliases.isdisjoint(self._reached) and not keep(one.parameter):
                        one.parameter.grad = None
                    # This comes before any write to the gradient's memory, which the caller may
                    # still read.
                    self._leave_to_holder(one)
                begins = [one for one in totals if not (keep(one.parameter) and self._adopt(one))]
                fresh.update(one.name for one in begins)
                cleared = [
                    one.gradient for one in begins if one.name not in self.exchange.gradients
                ]
                if cleared:
                    torch._foreach_zero_(cleared)
            if place in self.homes:
                prepared[place] = lane.mark()
        if courier is not None:
            self.exchange.begin(begun, prepared, fresh, courier)

    def finish(self, callers: Mapping[torch.device, Lane]) -> None:
        """Hand every parameter its gradient, once all replicas' gradients were added to it.

        Args:
            callers: the lanes of the caller's own work, which waits for the gradients.
        """
        # one batch has shown which of them a captured graph reaches
        while self._handles:
            self._handles.pop().remove()
        self.exchange.finish(callers)
        for one in chain.from_iterable(self._totals.values()):
            if not one.aliases.isdisjoint(self._reached) and not self._has(one):
                self._hand(one)

    def _has(self, one: _Total) -> bool:
        """Return whether the parameter's gradient is still the one that it was handed."""
        known = self._handed.get(id(one.parameter))
        return (
            known is not None and one.parameter.grad is not None and one.parameter.grad is known()
        )

    def _hand(self, one: _Total) -> None:
        # A new tensor over the same memory. A weak reference to it shows later whether the
        # parameter still has it, and whether anyone else keeps it.
        one.parameter.grad = handed = one.gradient.detach()
        self._handed[id(one.parameter)] = ref(handed)

    @torch.no_grad()
    def leave_to_holders(self) -> None:
        """Copy gradients that the caller keeps, before passes are run for a recording."""
        for one in chain.from_iterable(self._totals.values()):
            self._leave_to_holder(one)

    def _leave_to_holder(self, one: _Total) -> None:
        """Copy a gradient that the caller keeps after taking it from its parameter."""
        if not self._has(one):
            known = self._handed.pop(id(one.parameter), None)
            kept = None if known is None else known()
            if kept is not None:
                # The next batch writes to the shared memory: give the caller's tensor memory of its
                # own.
                kept.data = kept.clone()

    def _adopt(self, one: _Total) -> bool:
        """Bring the gradient that a parameter has into its place; return False if it has none."""
        if one.parameter.grad is None:
            return False
        if not self._has(one):
            one.gradient.copy_(one.parameter.grad)
        return True

    def drop(self) -> None:
        """Leave no parameter with a gradient, after a batch that failed."""
        for name, _ in self.aliases:
            self.parameters[name].grad = None
