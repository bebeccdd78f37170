"""A placement as the writers of formats see it, and the check that a format can express it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from placer.errors import PlacementError
from placer.exports.units import Unit


@dataclass(frozen=True)
class Plan:
    """The parts of a placement that an export needs.

    Attributes:
        layer_devices: the device of each layer, in execution order.
        replicas: for each device of ``layer_devices``, the devices that share its layers, itself
            first; empty without replicas.
        samples: for each device of ``replicas``, the samples of a micro-batch on each of its
            replicas.
        stages: the devices of ``layer_devices`` in pipeline order; empty: ordered by their first
            layer.
        devices: all devices of the request, also without layers; empty: not known.
        recompute: the devices that repeat their forward passes.
        training: whether a training step was placed.
        batch_size: samples in a micro-batch.
        chunks: micro-batches in a batch.
        schedule: the order of micro-batches.
        contiguous: whether no value comes back to a device.
        model: the ``nn.Module`` that was placed, possibly on meta; None if it was not given.
    """

    layer_devices: Mapping[str, str]
    replicas: Mapping[str, Sequence[str]]
    samples: Mapping[str, Sequence[int]] = field(default_factory=dict)
    stages: Sequence[str] = ()
    devices: Sequence[str] = ()
    recompute: Sequence[str] = ()
    training: bool = False
    batch_size: int = 1
    chunks: int = 1
    schedule: str = "1f1b"
    contiguous: bool = True
    model: Any = None

    @property
    def pipelines(self) -> int:
        """Return the number of pipelines that share each batch; 1 without replicas."""
        return max(map(len, self.replicas.values()), default=1)

    @property
    def replicas_by_stage(self) -> dict[str, int]:
        """Return the number of devices that hold each stage, by its first device."""
        stages = self.stages or dict.fromkeys(self.layer_devices.values())
        return {device: len(self.replicas.get(device, ())) or 1 for device in stages}

    @property
    def ranks(self) -> list[str]:
        """Return all devices, stage by stage, with the replicas of a stage next to each other."""
        stages = self.stages or dict.fromkeys(self.layer_devices.values())
        return [each for device in stages for each in self.replicas.get(device, [device])]


class Segment(NamedTuple):
    """Units that follow one another on one device.

    Attributes:
        device: its name.
        units: in execution order.
    """

    device: str
    units: tuple[Unit, ...]


def placed_units(plan: Plan, units: Sequence[Unit], title: str, advice: str) -> list[str]:
    """Return the device of each unit.

    Args:
        plan: the placement.
        units: the units of the format, which contain every layer once.
        title: the format's name, for the message.
        advice: how to obtain a placement that the format can express.

    Raises:
        PlacementError: the layers of a unit are on several devices.
    """
    found = []
    for unit in units:
        first_on = {plan.layer_devices[layer]: layer for layer in reversed(unit.layers)}
        if len(first_on) > 1:
            parts = ", ".join(
                f"{layer!r} on {device}" for device, layer in list(first_on.items())[::-1][:3]
            )
            raise PlacementError(
                f"{title} keeps {unit} on one device, "
                f"and this placement does not ({parts}): {advice}"
            )
        found.append(next(iter(first_on)))
    return found


def segments(plan: Plan, units: Sequence[Unit], title: str, advice: str) -> list[Segment]:
    """Return the segments of a pipeline in which each device holds one.

    Args:
        plan: the placement.
        units: the units of the format, in execution order.
        title: the format's name, for the message.
        advice: how to obtain a placement that the format can express.

    Raises:
        PlacementError: the layers of a unit are on several devices, or a device has several
            segments.
    """
    found = list(_runs(placed_units(plan, units, title, advice), units))
    seen: dict[str, Segment] = {}
    for segment in found:
        if (earlier := seen.get(segment.device)) is not None:
            raise PlacementError(
                f"{title} gives each device one segment of the model, and this placement gives "
                f"{segment.device} both {earlier.units[0].layers[0]!r} and, after other devices, "
                f"{segment.units[0].layers[0]!r}: {advice}"
            )
        seen[segment.device] = segment
    return found


def _runs(devices: Sequence[str], units: Sequence[Unit]) -> Iterator[Segment]:
    begin = 0
    for index in range(1, len(units) + 1):
        if index == len(units) or devices[index] != devices[begin]:
            yield Segment(devices[begin], tuple(units[begin:index]))
            begin = index
