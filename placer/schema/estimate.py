"""Estimates of the memory that a model needs, and of the devices on which it fits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, StringConstraints

from placer.schema.base import (
    FIRST,
    IN_ORDER,
    MAX_DEVICES,
    SCHEMA_VERSION,
    Bytes,
    Name,
    Recompute,
    Schedule,
    Wire,
)
from placer.schema.cluster import Cluster
from placer.schema.graph import Graph, Optimizer
from placer.schema.placement import MemoryUse

ChangeKind = Literal[
    "batch-size", "recompute", "optimizer-state", "sharding", "devices", "memory", "context"
]


class DeviceEstimate(Wire):
    """The memory of one device.

    Attributes:
        device: its name.
        layers: the number of layers that it holds.
        memory: by kind, at the peak; without the cache.
        cache_bytes: keys and values of generated texts.
        total_bytes: all of it.
        memory_bytes: the device's memory; None if it is unlimited.
        limit_bytes: the part of its memory that the model may use; None if it is unlimited.
    """

    device: Name
    layers: Annotated[int, Field(ge=0)]
    memory: MemoryUse
    cache_bytes: Bytes = 0
    total_bytes: Bytes
    memory_bytes: Bytes | None = None
    limit_bytes: Bytes | None = None

    @property
    def missing_bytes(self) -> int:
        """Return the bytes beyond the limit; 0 if the layers fit."""
        return 0 if self.limit_bytes is None else max(0, self.total_bytes - self.limit_bytes)


class Change(Wire):
    """A smallest change with which the model fits, found by solving.

    Attributes:
        kind: what changes: the micro-batch size, recomputation, the place of the optimizer's state,
            the number of devices, the memory of devices, the length of the texts in the cache, or
            the engine: fully sharded data parallelism instead of a pipeline, with ``batch_size``
            and ``chunks`` on each device.
        change: as text: ``micro-batches of 2 samples instead of 8``.
        batch_size: samples in a micro-batch.
        chunks: micro-batches in a batch.
        recompute: the devices that recompute.
        devices: the number of devices.
        memory_bytes: the memory of each device, in the order of the devices.
        total_bytes: the memory of the fullest device.
        limit_bytes: the memory that it may use.
    """

    kind: ChangeKind
    change: str
    batch_size: Annotated[int, Field(ge=1)]
    chunks: Annotated[int, Field(ge=1)]
    recompute: tuple[Name, ...] = ()
    devices: Annotated[int, Field(ge=1)]
    memory_bytes: tuple[Bytes, ...]
    total_bytes: Bytes
    limit_bytes: Bytes


class CardCount(Wire):
    """The smallest number of cards of a common size on which the model fits, found by solving.

    Attributes:
        memory_bytes: of each card.
        devices: the number of cards.
        total_bytes: the memory of the fullest card.
        limit_bytes: the part of each card that the model may use.
    """

    memory_bytes: Bytes
    devices: Annotated[int, Field(ge=1)]
    total_bytes: Bytes
    limit_bytes: Bytes


class Estimate(Wire):
    """The memory that a model needs on each device of the best placement by memory.

    Attributes:
        model: the name of the model's class or file.
        weights_only: whether only parameters were known, as in the header of a safetensors file.
        training: whether a training step was estimated.
        optimizer: the optimizer in training; None without one.
        batch_size: samples in a micro-batch.
        chunks: micro-batches in a batch, in training.
        schedule: the order of micro-batches.
        generate: tokens of each text in the cache; None without a cache.
        inputs: the inputs of one micro-batch, as text: ``input_ids: 1x1024:int64``.
        fits: whether the model fits on the devices; None if they are unlimited, or if the time
            ended before this was known.
        proven: whether no placement uses less of the fullest device.
        devices: the memory of each device. If the model does not fit, the largest devices hold
            more than their limit, and as little as possible.
        recompute: the devices that run forward again before each backward pass.
        layer_devices: the device of each layer, in execution order.
        changes: the smallest changes with which the model fits, if it does not fit.
        cards: numbers of common cards on which it fits, if no devices were given.
        notes: what was assumed or left out, as text.
    """

    schema_version: Literal["3"] = SCHEMA_VERSION
    model: Annotated[str, StringConstraints(max_length=512)] = ""
    weights_only: bool = False
    training: bool = False
    optimizer: Annotated[str, StringConstraints(max_length=128)] | None = None
    batch_size: Annotated[int, Field(ge=1)] = 1
    chunks: Annotated[int, Field(ge=1)] = 1
    schedule: Schedule = "1f1b"
    generate: Annotated[int, Field(ge=1)] | None = None
    inputs: tuple[str, ...] = ()
    fits: bool | None = None
    proven: bool = False
    devices: Annotated[tuple[DeviceEstimate, ...], Field(min_length=1, max_length=MAX_DEVICES)]
    recompute: tuple[Name, ...] = ()
    layer_devices: dict[Name, Name] = {}
    changes: tuple[Change, ...] = ()
    cards: tuple[CardCount, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def fullest(self) -> DeviceEstimate:
        """Return the device with the least free memory, or the most memory in use if unlimited."""
        return max(self.devices, key=lambda one: one.total_bytes - (one.limit_bytes or 0))


class EstimateRequest(Wire):
    """A request to estimate the memory of a captured graph; no weights are needed."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    schema_version: Literal["3"] = SCHEMA_VERSION

    graph: Graph
    """The model, captured with one micro-batch."""

    devices: Cluster | Annotated[str, StringConstraints(max_length=512)] | None = None
    """The devices, as text (``2x24GiB,12GiB``) or as a cluster.

    None: one device without a limit, and the numbers of common cards on which the model fits."""

    smaller: Annotated[tuple[Graph, ...], Field(max_length=16), FIRST] = ()
    """The same model, captured with smaller micro-batches, to be tried if it does not fit."""

    cache_bytes: Annotated[dict[Name, Bytes], IN_ORDER] = {}
    """The keys and values of generated texts, by layer, in inference."""

    optimizer: Optimizer | None = "adamw"
    """The optimizer whose state counts in training; null for none."""

    chunks: Annotated[int, Field(ge=1, le=1_000_000)] = 8
    """Micro-batches in a batch, in training."""

    schedule: Schedule = "1f1b"
    """The order of micro-batches, in training."""

    recompute: Recompute = "never"
    """Whether devices keep less and compute forward passes twice, in training."""

    reserve_bytes: Annotated[int, Field(ge=0, le=2**50)] = 512 * 2**20
    """Memory of each device that the model cannot use, for devices given as text."""

    time_limit_s: Annotated[float, Field(gt=0, le=60)] = 10.0
    """Seconds to solve the placement and all changes."""
