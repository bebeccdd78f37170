"""Several models that are used one after another, and their placements under one memory budget.

The models of a request take turns, as the text encoders, the UNet and the decoder of a diffusion
pipeline do. Model i runs runs(i) times in a request. All weights stay on their devices, and only
one model at a time has activations. With latency(i) and memory as ``placer.solver`` states them::

    request   = sum over models i of runs(i) * latency(i)
    memory(d) = sum over i of (params + buffers of i on d)
                + max over i of (activations and workspace of i on d)

``JointRequest.placement_request`` states the same as the latency of one profile, so that every
search, bound and check of a single model applies. Layer l of model i becomes ``i/l``, with runs(i)
times its time. Its values keep their size and are sent runs(i) times. In addition, all results of a
model, of zero bytes, are read by the first layers of the next model and never sent::

    text_encoder/embed ─▶ text_encoder/block ┄┄▶ unet/conv_in ─▶ unet/mid ┄┄▶ decoder/conv_in ─▶ ...
                                      (waits, sends nothing)

Whatever belongs to one model is freed before the next one begins. Therefore the peak of the joint
profile is the largest peak of a model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from placer.schema.base import LONGEST_MS, SCHEMA_VERSION, Name, Wire
from placer.schema.cluster import Cluster
from placer.schema.options import Constraints, SolveOptions
from placer.schema.placement import DeviceLoad, Placement
from placer.schema.profile import MOST_REPEATS, Edge, Layer, Profile
from placer.schema.request import PlacementRequest

SEPARATOR = "/"
"""Separator of a model's name and a layer's name in a joint profile."""

Runs = Annotated[int, Field(ge=1, le=MOST_REPEATS)]


class ProfiledModel(Wire):
    """A model of a joint request.

    Attributes:
        profile: its measurements.
        runs: how often it runs in one request.
    """

    profile: Profile
    runs: Runs = 1


class JointOptions(Wire):
    """How several models are placed together: constraints, and the limits of the search."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    constraints: Constraints = Constraints()
    """Requirements in addition to memory; layer ``conv_in`` of model ``unet`` is
    ``unet/conv_in``."""

    time_limit_s: Annotated[float, Field(gt=0, le=86_400)] = 30.0
    """Seconds to solve; the result is then the best placement so far, with its bound."""

    work_limit: Annotated[float, Field(gt=0, le=86_400)] | None = None
    """A limit of work that gives the same placement on every machine."""

    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """The seed of the solver's random choices."""

    workers: Annotated[int, Field(ge=1, le=256)] = 2
    """CPU cores that the solver may use."""

    break_ties: bool = False
    """Among equal placements, prefer less transfer, then equal loads."""

    explain: bool = False
    """Report what limits the placement and what would help most."""


class JointRequest(JointOptions):
    """A request for the placements of several models that are used one after another."""

    schema_version: Literal["3"] = SCHEMA_VERSION

    models: Annotated[dict[Name, ProfiledModel], Field(min_length=1, max_length=64)]
    """The models by name. Their profiles have the same devices."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name, model in self.models.items():
            if SEPARATOR in name:
                raise ValueError(
                    f"models: the name {name!r} has a {SEPARATOR!r}, which separates a model's "
                    "name from its layers' names; choose a name without it"
                )
            _refuse_long(name, model)
        if self.constraints.contiguous:
            raise ValueError(
                "constraints.contiguous is True, but a device takes turns with others whenever the "
                "next model begins; leave it out"
            )
        _ = self.cluster  # refuses profiles of different devices
        return self

    @property
    def cluster(self) -> Cluster:
        """Return the devices of all profiles, each with its smallest memory and largest reserve.

        Raises:
            ValueError: profiles have no devices, or different ones.
        """
        found: Cluster | None = None
        for name, model in self.models.items():
            if model.profile.cluster is None:
                raise ValueError(f"models: the profile of {name!r} has no cluster; measure it here")
            found = _smaller(found, model.profile.cluster, name)
        assert found is not None  # there is a model
        return found

    def of_model(self, name: str) -> PlacementRequest:
        """Return the request for the latency of one model by itself, without constraints."""
        options = SolveOptions(
            objective="latency", training=False, constraints=Constraints(contiguous=False)
        )
        return PlacementRequest.from_options(options, [self.models[name].profile], self.cluster)

    def placement_request(self) -> PlacementRequest:
        """Return the request for the latency of the joint profile.

        Raises:
            InputError: constraints name unknown layers or devices, or contradict each other.
        """
        same = {name: getattr(self, name) for name in JointOptions.model_fields}
        constraints = self.constraints.model_copy(update={"contiguous": False})
        options = SolveOptions(
            objective="latency", training=False, **{**same, "constraints": constraints}
        )
        return PlacementRequest.from_options(options, [joint_profile(self.models, self.cluster)])


class JointPlacement(Wire):
    """The placements of several models that are used one after another.

    Attributes:
        runs: how often each model runs in a request, by name.
        placements: the placement of each model, for ``DataFlow(model).update_flow``. Times, memory
            and bound are of the model by itself. Empty without a placement.
        joint: the placement of the joint profile: layer ``conv_in`` of model ``unet`` is
            ``unet/conv_in``. Times are of a request, and memory is of all models.
    """

    schema_version: Literal["3"] = SCHEMA_VERSION
    runs: dict[Name, Runs]
    placements: dict[Name, Placement] = {}
    joint: Placement

    @property
    def request_ms(self) -> float | None:
        """Return the time of a request: the sum of runs times latency; None without placements."""
        return self.joint.objective_value

    @property
    def bound_ms(self) -> float | None:
        """Return a proven lower bound of the time of a request."""
        return self.joint.bound

    @property
    def devices(self) -> tuple[DeviceLoad, ...]:
        """Return the load of each device in a request, and its memory with all models."""
        return self.joint.devices


def joint_profile(models: Mapping[str, ProfiledModel], cluster: Cluster) -> Profile:
    """Return one profile of all models, whose latency is the time of a request."""
    layers, edges = list[Layer](), list[Edge]()
    for name, model in models.items():
        layers += [_layer(name, layer, model.runs) for layer in model.profile.layers]
        edges += [
            Edge(
                source=_joined(name, edge.source),
                targets=_all_joined(name, edge.targets),
                bytes=edge.bytes,
                repeats=model.runs,
            )
            for edge in model.profile.edges
        ]
    edges += _waits(models)
    profiles = {name: model.profile for name, model in models.items()}
    return Profile(
        model=", ".join(f"{name}: {profile.model}" for name, profile in profiles.items()),
        granularity="custom",
        layers=tuple(layers),
        edges=tuple(edges),
        colocated=tuple(
            _all_joined(name, group)
            for name, profile in profiles.items()
            for group in profile.colocated
        ),
        tied=tuple(
            tie.model_copy(update={"layers": _all_joined(name, tie.layers)})
            for name, profile in profiles.items()
            for tie in profile.tied
        ),
        cluster=cluster,
    )


def _layer(name: str, layer: Layer, runs: int) -> Layer:
    times = {kind: runs * time_ms for kind, time_ms in layer.forward_ms.items()}
    return Layer(
        name=_joined(name, layer.name),
        module=layer.module,
        forward_ms=times,
        param_bytes=layer.param_bytes,
        buffer_bytes=layer.buffer_bytes,
        forward_workspace_bytes=layer.forward_workspace_bytes,
    )


def _refuse_long(name: str, model: ProfiledModel) -> None:
    """Raise a ValueError for the first layer whose runs take longer than any layer may."""
    for layer in model.profile.layers:
        longest_ms = max(layer.forward_ms.values(), default=0.0)
        if model.runs * longest_ms > LONGEST_MS:
            raise ValueError(
                f"models: layer {layer.name!r} of {name!r} has a forward_ms of {longest_ms:g} and "
                f"runs {model.runs} times in a request; a layer may take {LONGEST_MS:g} ms in total"
            )


def _waits(models: Mapping[str, ProfiledModel]) -> Iterator[Edge]:
    """Yield the edges that let each model begin when the one before it has ended."""
    for (before, one), (after, other) in pairwise(models.items()):
        read = {target for edge in other.profile.edges for target in edge.targets}
        first = [layer.name for layer in other.profile.layers if layer.name not in read]
        made = {edge.source for edge in one.profile.edges}
        for layer in one.profile.layers:
            if layer.name not in made:
                yield Edge(
                    source=_joined(before, layer.name),
                    targets=_all_joined(after, first),
                    bytes=0,
                    repeats=0,
                )


def _joined(name: str, layer: str) -> str:
    return f"{name}{SEPARATOR}{layer}"


def _all_joined(name: str, layers: Iterable[str]) -> tuple[str, ...]:
    return tuple(_joined(name, layer) for layer in layers)


def _smaller(known: Cluster | None, other: Cluster, name: str) -> Cluster:
    """Return the devices of both clusters, which are the same, with the memory that both have."""
    if known is None:
        return other
    theirs = {device.name: device for device in other.devices}
    types: dict[str, Any] = {device.name: device.type for device in known.devices}
    if types != {device.name: device.type for device in other.devices}:
        raise ValueError(
            f"models: the profile of {name!r} has the devices {', '.join(theirs)}, other profiles "
            f"{', '.join(types)}, or they differ in type; measure all models on the same devices"
        )
    devices = tuple(
        device.model_copy(
            update={
                "memory_bytes": min(device.memory_bytes, theirs[device.name].memory_bytes),
                "reserve_bytes": max(device.reserve_bytes, theirs[device.name].reserve_bytes),
            }
        )
        for device in known.devices
    )
    return known.model_copy(update={"devices": devices})
