"""The pipelines of a placement whose stages several devices hold, and their shares of a batch.

    micro-batch 0   ──▶ samples 0-2 ──▶ cuda:0 ──▶ cuda:1      pipeline 0
                    └─▶ samples 3-5 ──▶ cuda:2 ──▶ cuda:3      pipeline 1
    micro-batch 1   ──▶ ...

The map of layers names the devices of pipeline 0. Each of these devices has a replica in every
other pipeline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from placer.capture.layers import tensor_bytes
from placer.errors import PlacementError
from placer.schema import Placement


@dataclass(frozen=True)
class Replication:
    """Equal pipelines that share each micro-batch; by default there is only one.

    Attributes:
        devices: for each device of the map, the devices that hold its layers, itself first.
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
            PlacementError: the replicas do not form equal pipelines.
        """
        given = placement.replicas
        if not given:
            return cls()
        samples = _samples_by_pipeline(placement)
        devices = {
            device(name): tuple(device(one.device) for one in found)
            for name, found in given.items()
        }
        _refuse_shared_devices(devices)
        return cls(devices, samples) if len(samples) > 1 else cls()

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


def _samples_by_pipeline(placement: Placement) -> tuple[int, ...]:
    """Return the samples of each pipeline in a micro-batch.

    Raises:
        PlacementError: a stage has other numbers of replicas or samples than another.
    """
    given = placement.replicas
    counts = placement.replicas_by_stage
    if len(set(counts)) > 1:
        raise PlacementError(
            f"the stages have different numbers of replicas, {'-'.join(map(str, counts))}, and "
            "only equal pipelines run: solve with replicas='auto', export the placement with "
            "placement.export('pipedream'), or give every device of `layer_devices` as many "
            "replicas"
        )
    rows = {name: tuple(one.samples for one in found) for name, found in given.items()}
    (name, samples), *others = rows.items()
    for other, differing in others:
        if differing != samples:
            raise PlacementError(
                f"the replicas of {name} have {samples} samples, and the replicas of {other} "
                f"have {differing}; replicas at one position form a pipeline and need equally "
                "many"
            )
    return samples


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
