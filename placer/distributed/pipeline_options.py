"""The options of a pipeline: a placement's, or a map's by hand, as the caller changed them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from placer.capture.batch_dims.declared_layout import DEFAULT_OPTIONS, require_batch_options
from placer.errors import InputError, PlacementError, kind_of
from placer.executor.engine.shares import divided
from placer.executor.state.assignment import placing
from placer.executor.state.replication import ONE_PIPELINE, Replication
from placer.schema import BatchOptions, Placement
from placer.utils.units import count_text


@dataclass(frozen=True)
class PipelineOptions:
    """The options of a pipeline in several processes.

    The defaults are a plain map's, which has no options of its own.

    Attributes:
        layer_devices: the name of each layer's device.
        chunks: micro-batches in a batch.
        schedule: the name of the schedule.
        recompute: the devices that recompute, without the replicas of the first one.
        options: the declared batch layout.
        replication: the replicas, with names of devices in place of devices.
        room: for each stage, the maximum number of micro-batches in flight, if the order of passes
            depends on it and stages have different numbers of replicas.
    """

    layer_devices: Mapping[str, str]
    chunks: int = 1
    schedule: str = "1f1b"
    recompute: frozenset[str] = frozenset()
    options: BatchOptions = DEFAULT_OPTIONS
    replication: Replication = ONE_PIPELINE
    room: tuple[int, ...] = ()

    @classmethod
    def from_arguments(
        cls,
        given: Placement | Mapping[str, Any],
        chunks: int | None,
        schedule: str | None,
        recompute: Collection[str] | None,
        options: BatchOptions | None,
    ) -> PipelineOptions:
        """Return the options of a placement or map, replaced by the arguments of ``build``.

        Raises:
            InputError: if ``recompute`` or ``options`` have another type.
            PlacementError: if the placement is invalid, or something rests on the host.
        """
        if options is not None:
            require_batch_options(options)
        _require_kinds(given, recompute)
        if isinstance(given, Placement) or "layer_devices" in given:
            found = cls._from_placement(placing(given))
        else:
            found = cls._from_map(given)
        return replace(
            found,
            chunks=found.chunks if chunks is None else chunks,
            schedule=schedule or found.schedule,
            recompute=found._first_replicas(found.recompute if recompute is None else recompute),
            options=options or found.options,
        )

    @classmethod
    def _from_map(cls, given: Mapping[str, Any]) -> PipelineOptions:
        if not given:
            raise PlacementError("the map places no layer; give {layer: device}")
        _require_layer_names(given)
        return cls({name: str(place) for name, place in given.items()})

    @classmethod
    def _from_placement(cls, placement: Placement) -> PipelineOptions:
        _refuse_on_host(placement)
        has_room = placement.schedule in ("interleaved", "zero-bubble")
        return cls(
            placement.layer_devices,
            placement.chunks,
            placement.schedule,
            frozenset(placement.recompute),
            placement.batch_options,
            Replication.from_placement(placement, lambda name: cast(torch.device, name)),
            placement.in_flight if has_room else (),
        )

    def _first_replicas(self, devices: Iterable[str]) -> frozenset[str]:
        """Return the devices of the map whose layers these devices hold."""
        first = {member: name for name, members in self.replicas.items() for member in members}
        return frozenset(first.get(device, device) for device in devices)

    @property
    def replicas(self) -> dict[str, tuple[str, ...]]:
        """The devices that hold the layers of each device of the map, by pipeline."""
        return cast(dict[str, tuple[str, ...]], dict(self.replication.devices))

    def samples(self, size: int) -> list[int]:
        """Divide the samples of a micro-batch among the pipelines.

        Raises:
            InputError: if there are too few samples, or unequal units of stages with different
                numbers of replicas.
            PlacementError: if such stages have unlike shares.
        """
        ratios, count = self.replication.samples, self.replication.count
        if all(len(set(held)) == count for held in self.replicas.values()):
            if size < count:
                raise InputError(
                    f"example_inputs have {count_text(size, 'sample')} for {count} replicas; give "
                    "one micro-batch of all replicas, with at least one sample for each"
                )
            return divided(size, ratios)
        counts = "-".join(str(len(set(held))) for held in self.replicas.values())
        if len(set(ratios)) > 1:
            raise PlacementError(
                f"the stages have different numbers of replicas, {counts}, and shares of "
                f"{list(ratios)} samples, which placer.distributed does not run; give the replicas "
                "of a stage equally many samples, or run this placement in one process, by "
                "DataFlow.update_flow"
            )
        if size % count:
            raise InputError(
                f"example_inputs have {count_text(size, 'sample')}, and stages with {counts} "
                f"replicas divide a micro-batch into {count} equal units; give micro-batches of "
                f"a multiple of {count} samples"
            )
        return divided(size, ratios)

    def how(self, training: bool) -> str:
        """Return the options that all processes must agree on, as text."""
        again = f", recomputing on {', '.join(sorted(self.recompute))}" if self.recompute else ""
        chunks = count_text(self.chunks, "micro-batch", "micro-batches")
        # without functions, whose addresses differ between processes
        usual = DEFAULT_OPTIONS.model_dump()
        shown = {
            name: value for name, value in self.options.model_dump().items() if value != usual[name]
        }
        if self.options.weigh is not None:
            shown["weigh"] = "a function"
        batch = f", batch options {shown}" if shown else ""
        replicas = ""
        if self.replicas:
            held = ", ".join(" and ".join(dict.fromkeys(one)) for one in self.replicas.values())
            replicas = f", replicas on {held} with {self.replication.samples} samples"
        return (
            f"{chunks}, {self.schedule}, {'training' if training else 'forwards alone'}"
            f"{again}{batch}{replicas}"
        )

    def idle(self, used: Collection[str]) -> str:
        """Return a note for messages about named devices without any layer."""
        named = {place: name for name, place in self.layer_devices.items() if place not in used}
        if not named:
            return ""
        found = ", ".join(f"{place} ({name!r})" for place, name in named.items())
        return (
            f"; no layer that runs is on {found}: its result is not used, or it is one with the "
            "layer before it"
        )


def _refuse_on_host(placement: Placement) -> None:
    """Refuse a placement whose parameters or optimizer state rest on the host."""
    if placement.resting:
        raise PlacementError(
            "parameters rest on the host in this placement, which placer.distributed does not "
            "run; give one that was solved without host_memory_bytes and disk_bytes, or run "
            "this one in one process, by DataFlow.update_flow"
        )
    if placement.optimizer_state == "host":
        raise PlacementError(
            "optimizer state rests on the host in this placement, which placer.distributed "
            "does not run; give one that was solved with optimizer_state='device', or run this "
            "one in one process, by DataFlow.update_flow"
        )


def _require_kinds(given: Any, recompute: Any) -> None:
    if not isinstance(given, Placement | Mapping):
        raise PlacementError(
            f"the placement is {kind_of(given)}; give a Placement, which "
            "Placement.model_validate_json(text) makes of JSON, or a map {layer: device}"
        )
    if isinstance(recompute, str) or not isinstance(recompute, Collection | None):
        raise InputError(
            f"recompute is {recompute!r}; give the devices that are to recompute, as ['cuda:0']"
        )


def _require_layer_names(given: Mapping[Any, Any]) -> None:
    for name in given:
        if not isinstance(name, str):
            raise PlacementError(
                f"the map has {name!r}, which is not the name of a layer; give {{layer: device}}"
            )
