"""A model's weights on every device, so that layers change devices without copies."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from placer import devices
from placer.capture.layers import named_state
from placer.errors import InputError
from placer.executor.state.model_fingerprint import Census, are_same
from placer.executor.state.tensor_versions import writes


class Clones:
    """Copies of a module's state, one per device; a tied weight has one copy per device, too.

    The module's own tensors stay, and serve as the copy on their own device. After they change (an
    optimizer step, ``load_state_dict``), ``refresh`` updates the copies.

    Attributes:
        times_copied: number of updates; flows that share the clones detect outdated plans by it.
    """

    def __init__(self, module: nn.Module, places: Sequence[torch.device]) -> None:
        self._module = module
        self._census: Census | None = None
        self._state: dict[str, Tensor] = {}
        self._written: list[Any] = []
        self._copies: dict[torch.device, dict[str, Tensor]] = {place: {} for place in places}
        self.times_copied = 0
        self.refresh()

    def refresh(self) -> None:
        """Copy again if the module's state has changed since."""
        if self._census is None or not self._census.holds():
            self._census = Census(self._module)
            state = named_state(self._module)
            # replaced tensors have their own write counts: copy everything again
            if [*state] != [*self._state] or not are_same(
                [*state.values()], [*self._state.values()]
            ):
                self._written = []
            self._state = state
        written = writes([*self._state.values()])
        if written == self._written:
            return
        self._copies = {place: self._copied_to(place) for place in self._copies}
        # last, so that the next call copies again after a failure
        self._written = written
        self.times_copied += 1

    def cover(self, places: Iterable[torch.device]) -> None:
        """Copy the state to further devices; an error leaves the existing copies unchanged.

        Args:
            places: the devices of a map.
        """
        self.refresh()
        # all copies are made before any is kept
        self._copies |= {
            place: self._copied_to(place) for place in places if place not in self._copies
        }

    @property
    def places(self) -> list[torch.device]:
        """Return the devices with copies."""
        return list(self._copies)

    def keep_only(self, places: Collection[torch.device]) -> None:
        """Release the copies on all other devices."""
        self._copies = {place: copies for place, copies in self._copies.items() if place in places}

    @torch.inference_mode(False)
    @torch.no_grad()
    def _copied_to(self, place: torch.device) -> dict[str, Tensor]:
        return {name: _twin(tensor, place) for name, tensor in self._state.items()}

    def refuse_training(self) -> None:
        """Raise an InputError if the model would be trained, because clones would not be."""
        trains = torch.is_grad_enabled() and any(
            parameter.requires_grad for parameter in self._module.parameters()
        )
        if trains or self._module.training:
            raise InputError(
                "enable_clone is for inference: clones are not trained. Call flow.eval(), and run "
                "under torch.no_grad() or make the flow with inference_only=True; to train, make "
                "it without enable_clone"
            )

    def get(self, name: str, place: torch.device) -> Tensor:
        """Return the copy of a parameter or buffer on a device."""
        self.cover([place])
        return self._copies[place][name]


def _twin(tensor: Tensor, place: torch.device) -> Tensor:
    if devices.same(devices.location(tensor), place):
        return tensor
    return devices.copy(tensor, place)
