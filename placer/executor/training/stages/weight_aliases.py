"""The parameters as the passes of a pipeline see them: aliases with gradients in fixed memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
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
from placer.devices import Lane, Mark
from placer.executor.engine.weak_methods import weakly
from placer.executor.state.parameter_hooks import HOOKS, has_hooks
from placer.executor.state.segment_state import mutated
from placer.executor.state.state_copies import Copies, Copy

Keep = Callable[[Tensor], bool]
"""Whether a parameter's gradient waits for the next batch's."""

_REQUIRES_GRAD = attrgetter("requires_grad")


def keep_none(parameter: Tensor) -> bool:
    """Return False: no gradient waits."""
    return False


@dataclass
class _Held:
    """The parameters of one device.

    Attributes:
        own: the parameters that belong there, and their aliases.
        replicas: the parameters that belong elsewhere, and their aliases here.
    """

    own: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    replicas: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)


@dataclass
class Weights:
    """Aliases of the model's parameters that the passes differentiate by.

    Their gradients stay in place, since a recorded pass adds to the same memory at every replay. An
    alias shares its parameter's storage but none of its history, so a loss that the user keeps does
    not disturb a recording. If layers on several devices use a parameter, each further device has a
    replica.

    Attributes:
        aliases: by name and device.
        parameters: of the graph, by name.
        idle: parameters of the model that no layer of the graph uses; see ``leave_out``.
    """

    aliases: dict[tuple[str, torch.device], Tensor]
    parameters: dict[str, nn.Parameter]
    idle: list[nn.Parameter] = field(default_factory=list)
    _reached: set[int] = field(default_factory=set)
    _handed: dict[int, ref[Tensor]] = field(default_factory=dict)
    _handles: list[Any] = field(default_factory=list)
    _copies: Copies = field(default_factory=Copies)
    _read: dict[int, Copy] = field(default_factory=dict)

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

    def lookup(self, graph: LayerGraph) -> Callable[[str, torch.device], Tensor]:
        """Return a function that gives the layers of a graph their state."""
        # what layers change has to be the model's own
        copied = graph.constants - mutated(graph)

        def find(name: str, place: torch.device) -> Tensor:
            if name not in self.parameters:
                return (
                    self._plain(graph.state[name], place) if name in copied else graph.state[name]
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

    def refresh(self) -> None:
        """Bring the copies of plain tensors up to date, before a batch begins."""
        for copy in self._read.values():
            copy.refresh()

    def _alias(self, name: str, place: torch.device) -> Tensor:
        parameter = self.parameters[name]
        alias = devices.move(parameter.detach(), place).requires_grad_(parameter.requires_grad)
        if parameter.requires_grad:
            alias.grad = torch.zeros_like(alias, requires_grad=False)
            self._handles.append(alias.register_post_accumulate_grad_hook(weakly(self._passed)))  # type: ignore[no-untyped-call]
        self.aliases[name, place] = alias
        return alias

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

    @cached_property
    def _as_made(self) -> tuple[list[nn.Parameter], list[bool], list[nn.Parameter], list[int]]:
        """The parameters in use, at the time when the aliases were made.

        These are the parameters and whether they required gradients, then those with an alias of
        their own storage and the addresses of their data.
        """
        used = [self.parameters[name] for name, _ in self.aliases]
        return (
            used,
            [alias.requires_grad for alias in self.aliases.values()],
            [parameter for parameter, _ in self._own],
            devices.addresses([alias for _, alias in self._own]),
        )

    @cached_property
    def _held(self) -> dict[torch.device, _Held]:
        held: dict[torch.device, _Held] = {}
        for (name, place), alias in self.aliases.items():
            here = held.setdefault(place, _Held())
            (here.own if self.owned(name, place) else here.replicas).append(
                (self.parameters[name], alias)
            )
        return held

    @cached_property
    def _own(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameters that belong to the device of an alias, with it, of all devices."""
        return [pair for held in self._held.values() for pair in held.own]

    @cached_property
    def _guests(self) -> list[nn.Parameter]:
        """Parameters that no layer uses where they belong: only replicas give them gradients."""
        own = {id(parameter) for parameter, _ in self._own}
        return [
            self.parameters[name]
            for name, _ in self.aliases
            if id(self.parameters[name]) not in own
        ]

    @cached_property
    def homes(self) -> frozenset[torch.device]:
        """The devices of parameters that have replicas elsewhere."""
        return frozenset(
            devices.location(item) for held in self._held.values() for item, _ in held.replicas
        )

    @torch.no_grad()
    def begin(
        self,
        lanes: Mapping[torch.device, Lane],
        begun: Mapping[torch.device, Mark],
        keep: Keep = keep_none,
    ) -> None:
        """Make the gradients ready for a batch, and bring replicas up to date.

        Args:
            lanes: of each device.
            begun: by device, including ``homes``, when the parameters there are up to date.
            keep: whether the batch adds to the gradient that a parameter has; otherwise it begins
                at zero.
        """
        unreached = (parameter for parameter, alias in self._own if id(alias) not in self._reached)
        for parameter in chain(self._guests, self.idle, unreached):
            if not keep(parameter):
                parameter.grad = None
        for place, held in self._held.items():
            with lanes[place]:
                for parameter, alias in held.own:
                    self._leave_to_holder(parameter, alias)
                own = [
                    alias.grad
                    for parameter, alias in held.own
                    if not (keep(parameter) and self._adopt(parameter, alias))
                ]
                cleared = [gradient for gradient in own if gradient is not None]
                cleared += [alias.grad for _, alias in held.replicas if alias.grad is not None]
                if cleared:
                    torch._foreach_zero_(cleared)
                for parameter, alias in held.replicas:
                    lanes[place].wait(begun[devices.location(parameter)])
                    devices.fill(alias, parameter)

    @torch.no_grad()
    def finish(self) -> None:
        """Add the gradients of replicas up, and hand every parameter its gradient."""
        # one batch has shown which of them a captured graph reaches
        while self._handles:
            self._handles.pop().remove()
        for parameter, alias in self._own:
            if id(alias) in self._reached and not self._has(parameter, alias):
                self._hand(parameter, alias)
        for held in self._held.values():
            for parameter, alias in held.replicas:
                if id(alias) in self._reached and alias.grad is not None:
                    gradient = devices.copy(alias.grad, devices.location(parameter))
                    parameter.grad = (
                        gradient if parameter.grad is None else parameter.grad.add_(gradient)
                    )

    def _has(self, parameter: nn.Parameter, alias: Tensor) -> bool:
        """Return whether the parameter's gradient is still the one that it was handed."""
        known = self._handed.get(id(alias))
        return known is not None and parameter.grad is not None and parameter.grad is known()

    def _hand(self, parameter: nn.Parameter, alias: Tensor) -> None:
        assert alias.grad is not None
        parameter.grad = handed = alias.grad.detach()
        self._handed[id(alias)] = ref(handed)

    @torch.no_grad()
    def leave_to_holders(self) -> None:
        """Copy gradients that the caller keeps, before passes are run for a recording."""
        for parameter, alias in self._own:
            self._leave_to_holder(parameter, alias)

    def _leave_to_holder(self, parameter: nn.Parameter, alias: Tensor) -> None:
        """Copy a gradient that the caller keeps after taking it from its parameter."""
        if not self._has(parameter, alias):
            known = self._handed.pop(id(alias), None)
            kept = None if known is None else known()
            if kept is not None:
                kept.data = kept.clone()

    def _adopt(self, parameter: nn.Parameter, alias: Tensor) -> bool:
        """Bring the gradient that a parameter has into its place; return False if it has none."""
        if alias.grad is None or parameter.grad is None:
            return False
        if not self._has(parameter, alias):
            alias.grad.copy_(parameter.grad)
        return True

    def drop(self) -> None:
        """Leave no parameter with a gradient, after a batch that failed."""
        for name, _ in self.aliases:
            self.parameters[name].grad = None
