"""The settings of a flow, which its parts read: devices, the map in force, and options."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from placer import devices
from placer.capture.batch_dims.declared_layout import DEFAULT_OPTIONS
from placer.capture.granularity import Granularity
from placer.devices import DeviceLike
from placer.errors import InputError, PlacementError
from placer.executor.state.assignment import Assignment
from placer.executor.state.replication import ONE_PIPELINE, Replication
from placer.schema import BatchOptions, Placement, Schedule
from placer.schema.base import StatePlace, Tier
from placer.utils.units import count_text
from placer.utils.user_warnings import warn


@dataclass
class Settings:
    """Everything that ``update_flow`` sets or a user may edit; see the attributes of ``DataFlow``.

    A ``DataFlow`` writes them, and its parts only read them.

    Attributes:
        devices: that layers may run on.
        output_device: the device of results.
        deferred_batch_norm: whether running statistics follow whole batches.
        layer_gpus: by layer name, its device.
        granularity: of the layers in ``layer_gpus``.
        assignment: the devices of the layers since the last ``update_flow``; None before it.
        assumed: the placement whose memory assumptions hold; None after the map was edited.
        chunks: number of micro-batches by default.
        batch_options: of batches, by default.
        schedule: the order of micro-batches in training, by default.
        recompute: devices that run forward again in their backward passes.
        in_flight: for each segment, the maximum number of micro-batches in flight.
        replication: the pipelines that share each micro-batch.
        resting: by layer whose parameters rest on the host, in memory or on the disk.
        optimizer_state: where the optimizer's state is between steps, by default.
    """

    devices: list[torch.device]
    output_device: torch.device
    deferred_batch_norm: bool
    layer_gpus: OrderedDict[str, DeviceLike] = field(default_factory=OrderedDict)
    granularity: Granularity = "submodule"
    assignment: Assignment | None = None
    assumed: Placement | None = None
    chunks: int = 1
    batch_options: BatchOptions = DEFAULT_OPTIONS
    schedule: Schedule = "1f1b"
    recompute: list[DeviceLike] = field(default_factory=list)
    in_flight: Sequence[int] = ()
    replication: Replication = ONE_PIPELINE
    resting: Mapping[str, Tier] = field(default_factory=dict)
    optimizer_state: StatePlace = "device"
    _has_warned: bool = False

    def device(self, place: DeviceLike) -> torch.device:
        """Return a device by name; a bare index means the type of the flow's devices.

        Raises:
            PlacementError: if there is no such device.
        """
        try:
            device = devices.parse(place, self.devices[0].type)
            devices.require(device)
        except InputError as error:
            raise PlacementError(str(error)) from error
        return device

    def recomputed(self) -> frozenset[torch.device]:
        """Return the devices that run forward again in their backward passes."""
        if isinstance(self.recompute, str) or not isinstance(self.recompute, Iterable):
            raise InputError(f"flow.recompute is {self.recompute!r}; give a list of devices")
        places = frozenset(map(self.device, self.recompute))
        if unknown := places.difference(self.devices):
            known = ", ".join(map(str, self.devices))
            raise InputError(
                f"flow.recompute has {min(map(str, unknown))}; the flow's devices are {known}"
            )
        return places

    def refuse_resting(self, what: str) -> None:
        """Raise an InputError if parameters rest on the host.

        Args:
            what: does not support this.
        """
        if self.resting:
            raise InputError(
                f"{what} does not support parameters that rest on the host, as the placement has "
                f"them for {count_text(len(self.resting), 'layer')} ({next(iter(self.resting))}, "
                "...): give a placement that was solved without host_memory_bytes and disk_bytes"
            )

    def reset(self, layer_gpus: OrderedDict[str, DeviceLike], granularity: Granularity) -> None:
        """Set everything to its default, except the devices.

        Args:
            layer_gpus: the default map.
            granularity: of its layers.
        """
        fixed = self.devices, self.output_device, self.deferred_batch_norm
        fresh = Settings(*fixed, layer_gpus, granularity, _has_warned=self._has_warned)
        vars(self).update(vars(fresh))

    def warn_of_edits(self) -> None:
        """Warn once if a map was edited before the first ``update_flow``."""
        if self.layer_gpus and not self._has_warned and len(set(self.layer_gpus.values())) > 1:
            self._has_warned = True
            warn(
                "layer_gpus was edited, and the model runs unsplit: call flow.update_flow() for it "
                "to be followed"
            )
