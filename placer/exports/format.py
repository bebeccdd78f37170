"""The base class of formats: what a format can express, how it is written, and how it is read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from placer.errors import InputError, PlacementError
from placer.exports.plan import Plan, Segment, placed_units, segments
from placer.exports.units import Unit, is_number, modules_of
from placer.schema.base import FormatName
from placer.schema.export import Export
from placer.schema.request import PlacementRequest
from placer.utils.units import count_text


class Format(ABC):
    """A format in which another engine takes a placement.

    In all methods, ``layers`` are the names of all layers, in execution order.

    Attributes:
        name: as users write it.
        title: the engine and its setting, for messages.
        source: the documentation or source that defines the grammar, with the version read.
        in_segments: whether each device holds one segment of the execution order.
        contiguous: whether values never come back to a device, which ``in_segments`` implies.
        trains: whether the engine trains models or only serves them; None: it does both.
        replicates: whether the engine also runs equal copies of the pipeline.
        replicates_by_stage: whether stages may have numbers of replicas of their own.
        states_replicas: whether the text says which devices are replicas.
        copies_shared: whether layers that share parameters may be on several devices.
    """

    name: ClassVar[FormatName]
    title: ClassVar[str]
    source: ClassVar[str]
    in_segments: ClassVar[bool] = True
    contiguous: ClassVar[bool] = False
    trains: ClassVar[bool | None] = None
    replicates: ClassVar[bool] = False
    replicates_by_stage: ClassVar[bool] = False
    states_replicas: ClassVar[bool] = False
    copies_shared: ClassVar[bool] = False

    @abstractmethod
    def units(self, layers: Sequence[str]) -> list[Unit]:
        """Return the groups of layers that the format places as a whole."""

    def kept_whole(self, layers: Sequence[str], model: Any) -> list[tuple[str, ...]]:
        """Return further groups of layers that the engine keeps on one device for this model."""
        return []

    @abstractmethod
    def text(self, plan: Plan) -> str:
        """Return the text for the engine; ``export`` has checked the number of replicas.

        Raises:
            PlacementError: the format cannot express the placement.
        """

    @abstractmethod
    def read(self, text: str, layers: Sequence[str], devices: Sequence[str]) -> dict[str, str]:
        """Return the device of each layer that a text of this format states.

        If the text states several equal pipelines, this is the first of them.

        Args:
            text: in the format, as ``text`` writes it or as users of the engine write it.
            layers: the names of all layers, in execution order.
            devices: the names of the devices; stage or rank i is on device i.

        Raises:
            InputError: the text is not in this format, or does not fit the layers or devices.
        """

    def notes(self, plan: Plan) -> list[str]:
        """Return what the text cannot say, as sentences for the user of the engine."""
        ranks = plan.ranks
        found = []
        if self.trains is not None and self.trains != plan.training:
            placed, used = ("training", "inference")[:: 1 if plan.training else -1]
            found.append(
                f"This placement is for {placed}, and format {self.name!r} for {used}: solve again "
                f"with training={self.trains} (--{used})."
            )
        if (self.in_segments or self.contiguous) and ranks != sorted(ranks, key=_natural):
            found.append(f"The ranks of the engine, in order, are the devices {', '.join(ranks)}.")
        if plan.pipelines > 1 and not self.states_replicas:
            found.append(f"Run {plan.pipelines} equal copies of the pipeline, by data parallelism.")
        if plan.recompute:
            found.append(
                "Recompute the forward passes (activation checkpointing) of the stages on "
                f"{', '.join(plan.recompute)}."
            )
        return found

    def export(self, plan: Plan) -> Export:
        """Return the placement in this format.

        Raises:
            PlacementError: the format cannot express it, or the model is not the one that was
                placed.
        """
        if not plan.layer_devices:
            raise PlacementError(f"this placement places no layer, so {self.title} cannot have it")
        model = plan.model
        if model is not None and (isinstance(model, type) or not hasattr(model, "named_modules")):
            raise PlacementError(
                f"model is {model!r:.80}; give the nn.Module that was placed, or nothing"
            )
        if plan.pipelines > 1 and not self.replicates:
            raise PlacementError(
                f"{self.title} has no replicas, and this placement shares the layers of "
                f"{next(iter(plan.replicas))} among {plan.pipelines} devices: {self.advice}"
            )
        if len(set(plan.replicas_by_stage.values())) > 1 and not self.replicates_by_stage:
            counts = [f"{count} of {device}" for device, count in plan.replicas_by_stage.items()]
            raise PlacementError(
                f"{self.title} needs equally many replicas of every stage, and this placement has "
                f"{', '.join(counts)}: {self.advice}"
            )
        if uneven := [device for device, each in plan.samples.items() if len(set(each)) > 1]:
            raise PlacementError(
                f"{self.title} gives all replicas equally many samples, and this placement gives "
                f"the replicas of {uneven[0]} {', '.join(map(str, plan.samples[uneven[0]]))}: use "
                "micro-batches that the number of replicas divides"
            )
        text = self.text(plan)
        # After the text, since a format may say more precisely what the model lacks.
        if model is not None:
            _refuse_other_model(plan)
        return Export(format=self.name, text=text, notes=tuple(self.notes(plan)))

    def restricted(self, request: PlacementRequest) -> PlacementRequest:
        """Return the request with rules of the engine that units and segments do not express.

        Raises:
            InputError: the request demands what the format cannot express.
        """
        return request

    def refuse_more_stages(self, stages: int, devices: Sequence[str]) -> None:
        """Raise an InputError if a text states more stages than there are devices."""
        if stages > len(devices):
            raise InputError(
                f"{self.title} states {count_text(stages, 'stage')}, and there are "
                f"{count_text(len(devices), 'device')}; give as many devices as stages"
            )

    def placed_whole(self, units: Sequence[Unit], device_of: Mapping[str, str]) -> dict[str, str]:
        """Return the device of each layer of units, of which a text places the parts.

        Raises:
            InputError: the parts of a unit are on several devices.
        """
        found: dict[str, str] = {}
        for unit in units:
            first, *others = unit.keys
            for other in others:
                if device_of[other] != device_of[first]:
                    raise InputError(
                        f"{self.title} cuts before {other!r}, which shares calls with {first!r}; "
                        "move the cut"
                    )
            found |= dict.fromkeys(unit.layers, device_of[first])
        return found

    @property
    def advice(self) -> str:
        """Return how to obtain a placement that the format can express."""
        return f"solve again with for_format={self.name!r} (--for-format {self.name})"

    def placed_units(self, plan: Plan) -> list[tuple[Unit, str]]:
        """Return each unit with its device.

        Raises:
            PlacementError: the layers of a unit are on several devices.
        """
        units = self.units(list(plan.layer_devices))
        return list(zip(units, placed_units(plan, units, self.title, self.advice), strict=True))

    def segments(self, plan: Plan) -> list[Segment]:
        """Return the segments of the pipeline, each on its own device.

        Raises:
            PlacementError: the layers of a unit are on several devices, or a device has several
                segments.
        """
        return segments(plan, self.units(list(plan.layer_devices)), self.title, self.advice)


def _natural(device: str) -> tuple[str, int]:
    kind, _, index = device.rpartition(":")
    return (kind, int(index)) if is_number(index) else (device, 0)


def _refuse_other_model(plan: Plan) -> None:
    """Raise a PlacementError if the model lacks a module that the placement names."""
    modules = {path for path, _ in plan.model.named_modules(remove_duplicate=False)}
    for layer in plan.layer_devices:
        if not modules.issuperset(modules_of(layer)):
            raise PlacementError(
                f"layer {layer!r} is not a module of {type(plan.model).__name__}; give the model "
                "that was placed"
            )
