"""State of random number generators: restored after a block, or replayed for a second pass."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from placer.devices.recording import recording

_MASK = (1 << 63) - 1
# Minimum step of a generator's offset when numbers are drawn.
_DRAWN = 4
# Odd multiplier whose multiples spread over 64 bits (golden ratio).
_APART = 0x9E3779B97F4A7C15


@contextmanager
def keep_random_state(devices: Sequence[torch.device]) -> Iterator[None]:
    """Restore the random number generators of host and devices after the block."""
    indices = [device.index or 0 for device in devices if device.type == "cuda"]
    with torch.random.fork_rng(devices=indices, device_type="cuda"):
        yield


def set_apart(devices: Sequence[torch.device]) -> None:
    """Give devices whose generators have one seed other seeds, so that they draw other numbers.

    ``torch.manual_seed`` seeds all devices alike. The first device keeps its seed, and the others'
    seeds follow from it.

    Args:
        devices: those that draw for equal layers; stand-ins share one generator and are left alone.
    """
    if len(devices) < 2 or any(device.type != "cuda" for device in devices):
        return
    generators = [torch.cuda.default_generators[device.index or 0] for device in devices]
    seeds: set[int] = set()
    for number, generator in enumerate(generators):
        seed = generator.initial_seed()
        if seed in seeds:
            seed = (generators[0].initial_seed() + _APART * number) & _MASK
            generator.manual_seed(seed)
        seeds.add(seed)


class OwnSeed:
    """A seed of this process's own, where ``torch.manual_seed`` seeds processes alike.

    Args:
        number: of the process, among those that draw for equal layers. The process with number 0
            keeps its seed; the others' seeds follow from theirs.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._seed: int | None = None

    def set_on(self, device: torch.device) -> None:
        """Seed a GPU's generator again, if it was seeded since the last call.

        The host's generator is left alone: it may decide which samples form a batch, and this has
        to be the same in all processes.
        """
        if device.type == "cuda":
            self.set(torch.cuda.default_generators[device.index or 0])

    def set(self, generator: torch.Generator) -> None:
        """Seed a generator again, if it was seeded since the last call."""
        seed = generator.initial_seed()
        if self._number and seed != self._seed:
            self._seed = (seed + _APART * self._number) & _MASK
            generator.manual_seed(self._seed)


@functools.cache
def own_seed(number: int) -> OwnSeed:
    """Return the seed of this process; the same object for equal numbers.

    Args:
        number: see ``OwnSeed``.
    """
    return OwnSeed(number)


class Repeated:
    """The random numbers of one pass, replayed for a second pass.

        with repeated.first(): ...     # draws
        with repeated.again(): ...     # draws the same numbers; later draws are unaffected

    A recorded pass cannot set a generator back. So the two passes are recorded with two generators,
    which receive the same seed before each batch and then advance in step.

    Args:
        device: where the passes run; numbers drawn on the host repeat too.
    """

    def __init__(self, device: torch.device) -> None:
        self._kept: list[Any] = []
        self._default: Any = None
        self.generators: list[Any] = []
        if device.type == "cuda":
            # the generators exist only after initialisation, which torch otherwise delays
            torch.cuda.init()  # type: ignore[no-untyped-call]
            self._default = torch.cuda.default_generators[device.index or 0]
            self.generators = [self._default.clone_state(), self._default.clone_state()]

    def seed(self) -> None:
        """Seed both generators for a new batch, derived from the device's generator."""
        if self._default is None:
            return
        state = self._default.get_state()
        seed, offset = state.view(torch.int64).tolist()
        # advance the device's generator as a draw would, so that batches get different seeds
        state.view(torch.int64)[1] = offset + _DRAWN
        self._default.set_state(state)
        mixed = (seed + _APART * (offset + 1)) & _MASK
        for generator in self.generators:
            generator.manual_seed(mixed)

    @contextmanager
    def first(self) -> Iterator[None]:
        """Run the pass that draws."""
        if self._recorded():
            with self._with(self.generators[0]):
                yield
            return
        self._kept = self._states()
        yield

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run the pass that draws the same numbers."""
        if self._recorded():
            with self._with(self.generators[1]):
                yield
            return
        present = self._states()
        self._restore(self._kept)
        try:
            yield
        finally:
            self._restore(present)

    def _recorded(self) -> bool:
        return self._default is not None and recording()

    @contextmanager
    def _with(self, generator: Any) -> Iterator[None]:
        present = self._default.graphsafe_get_state()
        self._default.graphsafe_set_state(generator)
        try:
            yield
        finally:
            self._default.graphsafe_set_state(present)

    def _states(self) -> list[Any]:
        host = [torch.get_rng_state()]
        return host if self._default is None else [*host, self._default.get_state()]

    def _restore(self, states: list[Any]) -> None:
        torch.set_rng_state(states[0])
        if self._default is not None:
            self._default.set_state(states[1])
