"""The pipelines of a placement whose stages several devices hold, and their shares of a batch.

    micro-batch 0   ──▶ samples 0-2 ──▶ cuda:0 ──▶ cuda:1      pipeline 0
                    └─▶ samples 3-5 ──▶ cuda:2 ──▶ cuda:3      pipeline 1
    micro-batch 1   ──▶ ...

The map of layers names the devices of pipeline 0. If stages have different numbers of replicas,
there are as many pipelines as the least common multiple of these numbers. Of U pipelines, U / m
consecutive ones share each of the m replicas of a stage. Two replicas, then one, then two::

    pipeline 0      cuda:0 ──▶ cuda:2 ──▶ cuda:3
    pipeline 1      cuda:1 ──▶ cuda:2 ──▶ cuda:4
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import torch
from torch import nn

from placer.capture.layers import tensor_bytes
from placer.errors import PlacementError
from placer.schema import Placement

Each = TypeVar("Each")


@dataclass(frozen=True)
class Replication:
    """Pipelines that share each micro-batch; by default there is only one.

    Attributes:
        devices: for each device of the map, the devices that hold its layers, by pipeline; itself
            first.
        samples: for each pipeline, its samples of a micro-batch; their ratios count.
    """

    devices: Mapping[torch.device, tuple[torch.device, ...]] = field(default_factory=dict)
    samples: tuple[int, ...] = (1,)

    @classmethod
    def from_placement(
        cls, placement: Placement, device: Callable[[str], torch.device]
    ) -> Replication:
        """Return the pipelines of a placement.

        Args:
            placement: with ``replicas``, or without.
            device: returns a device by its name.

        Raises:
            PlacementError: a device is named twice, or stages divide micro-batches differently.
        """
        if not placement.replicas:
            return cls()
        count, samples = _samples_by_pipeline(placement)
        devices = {}
        for name in dict.fromkeys([*placement.replicas, *placement.layer_devices.values()]):
            held = tuple(device(one.device) for one in placement.replicas.get(name, ()))
            devices[device(name)] = held or (device(name),)
        _refuse_shared_devices(devices)
        found = {place: _by_pipeline(held, count) for place, held in devices.items()}
        return cls(found, samples) if count > 1 else cls()

    @property
    def count(self) -> int:
        """The number of pipelines."""
        return len(self.samples)

    @cached_property
    def turns(self) -> tuple[int, ...]:
        """The pipelines that consecutive batches of a stream go to.

        Each takes batches in proportion to its samples.
        """
        taken = [0] * self.count
        order = []
        for _ in range(sum(self.samples) // math.gcd(*self.samples)):
            chosen = min(range(self.count), key=lambda one: (taken[one] + 1) / self.samples[one])
            taken[chosen] += 1
            order.append(chosen)
        return tuple(order)

    def every_device(self) -> Iterator[torch.device]:
        """Yield all devices that hold replicas."""
        for found in self.devices.values():
            yield from found

    def of(self, device: torch.device) -> tuple[torch.device, ...]:
        """Return the devices that hold what the map has on a device, by pipeline."""
        return self.devices.get(device, (device,) * self.count)

    def places(self, pipeline: int, places: Sequence[torch.device]) -> list[torch.device]:
        """Return the devices of layers in a pipeline, from those in pipeline 0."""
        return [self.of(place)[pipeline] for place in places]

    def rounds(self, device: torch.device, pipelines: int) -> list[list[int]]:
        """Return which pipelines run layers at one time, one on each device that holds them.

        Args:
            device: of the layers, in the map.
            pipelines: how many there are; a batch of few samples leaves some out.
        """
        before: Counter[torch.device] = Counter()
        rounds: list[list[int]] = []
        for pipeline, own in enumerate(self.of(device)[:pipelines]):
            if before[own] == len(rounds):
                rounds.append([])
            rounds[before[own]].append(pipeline)
            before[own] += 1
        return rounds


def _by_pipeline(replicas: Sequence[Each], pipelines: int) -> tuple[Each, ...]:
    """Return what the replica of a stage in each pipeline has; consecutive pipelines share one."""
    return tuple(replicas[number * len(replicas) // pipelines] for number in range(pipelines))


def _samples_by_pipeline(placement: Placement) -> tuple[int, tuple[int, ...]]:
    """Return the number of pipelines, and the samples of each in a micro-batch.

    Raises:
        PlacementError: stages divide a micro-batch differently.
    """
    given = placement.replicas
    count = math.lcm(*map(len, given.values()))
    rows = {
        name: _by_pipeline([one.samples * len(found) for one in found], count)
        for name, found in given.items()
    }
    (name, units), *others = rows.items()
    for other, differing in others:
        if differing != units:
            first, second = ([one.samples for one in given[key]] for key in (name, other))
            raise PlacementError(
                f"the replicas of {name} have {first} samples, and the replicas of {other} have "
                f"{second}; the pipelines that they form need equally many in every stage: give "
                "each replica its part of a micro-batch, or solve with replicas='by-stage'"
            )
    # a multiple of every number of replicas, and so of their least common multiple
    return count, tuple(unit // count for unit in units)


def _refuse_shared_devices(devices: Mapping[torch.device, tuple[torch.device, ...]]) -> None:
    """Raise a PlacementError unless each replica has its own device, and the first is the stage's.

    Args:
        devices: for each device of the map, the devices of its replicas.
    """
    seen: set[torch.device] = set()
    for own, found in devices.items():
        if found[0] != own:
            raise PlacementError(
                f"the first replica of {own} is {found[0]}; it has to be the device itself"
            )
        for replica in found:
            if replica in seen:
                raise PlacementError(
                    f"`replicas` names {replica} more than once; every replica needs a device "
                    "of its own"
                )
            seen.add(replica)


ONE_PIPELINE = Replication()
"""No replicas: every layer is on one device."""


def owners(
    module: nn.Module,
    place_of: Callable[[str], torch.device],
    replication: Replication,
) -> dict[str, torch.device]:
    """Divide the parameters of each stage among the devices that hold it, by whole parameters.

    The owner of a parameter has the parameter itself, and the optimizer's state for it. Each
    parameter goes to the device with the fewest bytes so far. As parameters come in the order of
    the model, every run of layers is about evenly divided, too.

    Args:
        module: the model.
        place_of: returns the device of a parameter in pipeline 0, by name.
        replication: the pipelines.

    Returns:
        The owner of every trained parameter, by name.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models", SC 2020 (stage 1).
    """
    if replication.count == 1:
        return {}
    loads = dict.fromkeys(replication.every_device(), 0)
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and not nn.parameter.is_lazy(parameter):
            choices = replication.of(place_of(name))
            owner = min(choices, key=lambda place: loads.get(place, 0))
            loads[owner] = loads.get(owner, 0) + tensor_bytes(parameter)
            found[name] = owner
    return found
