"""The request for a placement: a profile, devices, and what to solve."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from placer.errors import InputError, kind_of
from placer.schema.base import (
    FIRST,
    SCHEMA_VERSION,
    ScheduleChoice,
    StepKind,
    Wire,
    refuse_duplicates,
    refuse_unknown,
)
from placer.schema.cluster import Cluster, Device
from placer.schema.options import SolveOptions
from placer.schema.profile import Edge, Layer, Profile
from placer.utils.units import count_text
from placer.utils.user_warnings import warn

MOST_CHUNKS_OF_A_STEP = 10_000
"""Limit of the simulation, which takes longer than a second per device beyond it."""

OBJECTIVES_OF_REPLICAS = ("step", "throughput")
"""The objectives under which stages may have replicas."""

OBJECTIVES_OF_RESTING = ("latency", "generation")
"""The objectives under which parameters may rest on the host or on its disk."""


class Question(Wire):
    """What a placement is asked for: measured layers, and the devices to place them on."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    schema_version: Literal["3"] = SCHEMA_VERSION

    profile: Profile
    """The measurements of the layers."""

    profiles: Annotated[tuple[Profile, ...], Field(max_length=64), FIRST] = ()
    """Measurements of the same layers at further micro-batch sizes, for objective ``step``.

    The placement uses one of the sizes."""

    cluster: Cluster | None = None
    """The devices to place on; by default the devices of the profile."""

    token_profile: Profile | None = None
    """Measurements of a pass of one token, for objective ``generation``; ``profile`` has the
    prompt's pass.

    It has the same layers. Its buffers also hold the keys and values of one generation, at the
    capacity that the longest text needs."""


# The order of the bases is the order of the fields in JSON, on which content_hash depends.
class PlacementRequest(SolveOptions, Question):
    """A request for the best device of each layer; ``SolveOptions`` describes its options."""

    schedule: ScheduleChoice = "1f1b"
    """The order of micro-batches.

    In training it decides how many micro-batches are in flight at a stage, see ``SolveOptions``.
    Only objective ``step`` accepts ``auto``."""

    step_kind: StepKind = "isolated"
    """Which step objective ``step`` makes short.

    ``isolated``: a step from idle devices to idle devices. ``steady-state``: one of many steps; a
    device begins it as soon as it has finished its own part of the step before."""

    @classmethod
    def from_options(
        cls,
        options: SolveOptions,
        profiles: Sequence[Profile],
        cluster: Cluster | None = None,
        token_profile: Profile | None = None,
    ) -> Self:
        """Ask what options say about profiles, with the defaults that depend on the objective.

        Args:
            options: what to solve; other fields, as ``SuggestOptions`` has, are not used.
            profiles: of the same layers, of different micro-batch sizes; the last one is the
                request's own.
            cluster: the devices to place on; by default the devices of the profile.
            token_profile: the pass of one token, for objective ``generation``.

        Raises:
            InputError: an argument has another type, there is no profile, or the parts contradict
                each other.
        """
        if not isinstance(options, SolveOptions):
            raise InputError(f"options is {kind_of(options)}; give placer.SolveOptions(...)")
        if not isinstance(profiles, list | tuple):
            raise InputError(f"profiles is {kind_of(profiles)}; give a list, such as [profile]")
        if not profiles:
            raise InputError("the list of profiles is empty; give a profile, or several")
        asked = {name: getattr(options, name) for name in SolveOptions.model_fields}
        profile = profiles[-1]
        is_step = options.objective == "step"
        is_training = profile.training if options.training is None else options.training
        asked["schedule"] = options.schedule or ("auto" if is_step else "1f1b")
        # A training loop runs steps one after another; a single inference batch may come alone.
        asked["step_kind"] = options.step_kind or (
            "steady-state" if is_step and is_training else "isolated"
        )
        return cls(
            profile=profile,
            profiles=tuple(profiles[:-1]),
            token_profile=token_profile,
            cluster=cluster,
            **asked,
        )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        cluster = self.cluster or self.profile.cluster
        if cluster is None:
            raise ValueError(
                "neither the request nor its profile has a cluster: give the devices to place on"
            )
        if self.is_training and not self.profile.training:
            raise ValueError("training is asked for, but the profile was made with training=False")
        layers = {layer.name for layer in self.profile.layers}
        devices = {device.name for device in cluster.devices}
        rules = self.constraints
        # Names first: a misspelled one is the cause of other contradictions.
        refuse_unknown("constraints.pinned", rules.pinned, layers)
        refuse_unknown("constraints.pinned", rules.pinned.values(), devices, "device")
        refuse_unknown(
            "constraints.forbidden", (name for name in rules.forbidden if name != "*"), layers
        )
        for banned in rules.forbidden.values():
            refuse_unknown("constraints.forbidden", banned, devices, "device")
        for group in rules.colocated:
            refuse_unknown("constraints.colocated", group, layers)
        if isinstance(rules.recompute, dict):
            refuse_unknown(
                "constraints.recompute",
                (name for name in rules.recompute if name != "*"),
                devices,
                "device",
            )
        _refuse_unreachable(cluster)
        self._check_pins(cluster)
        self._check_numbers(len(devices), len(layers))
        for profile in (self.profile, *self.profiles):
            self._check_times(profile, cluster)
        self._check_generation(cluster)
        self._check_repeats()
        self._check_sizes()
        self._check_replicas()
        self._check_resting()
        self._check_optimizer_state(cluster)
        if (self.bottleneck_ms is None) == (self.objective == "devices"):
            if self.objective == "devices":
                raise ValueError(
                    "bottleneck_ms is missing: objective 'devices' needs the longest time of a"
                    " device for one micro-batch (--bottleneck MS)"
                )
            raise ValueError(
                f"bottleneck_ms is {self.bottleneck_ms:g}, which only objective 'devices' uses; the"
                f" objective is {self.objective!r}: leave bottleneck_ms out"
            )
        return self

    def _check_generation(self, cluster: Cluster) -> None:
        """Check the fields of the objective ``generation``: two profiles of the same layers."""
        asked, token = self.generation, self.token_profile
        if self.objective != "generation":
            for name, given in {"generation": asked, "token_profile": token}.items():
                if given is not None:
                    raise ValueError(
                        f"{name}: only objective 'generation' uses it; the objective is "
                        f"{self.objective!r}: leave {name} out, or change the objective"
                    )
            return
        if asked is None:
            raise ValueError(
                "generation is missing: objective 'generation' needs prompt_tokens and new_tokens"
            )
        if self.is_training:
            raise ValueError(
                "training is asked for, and objective 'generation' places inference; give "
                "training=False, or another objective"
            )
        if self.break_ties:
            raise ValueError(
                "break_ties: objective 'generation' does not choose among equally fast placements; "
                "leave break_ties out"
            )
        if token is None:
            raise ValueError(
                "token_profile is missing: objective 'generation' needs a profile of a pass of one "
                "token in addition to the prompt's; placer.suggest measures both"
            )
        self._check_times(token, cluster)
        _refuse_other_passes(self.profile, token)
        measured = _measured_tokens(self.profile, token)
        if measured not in (None, asked.prompt_tokens):
            raise ValueError(
                f"generation.prompt_tokens is {asked.prompt_tokens}, but most values of the"
                f" prompt's profile are {measured} times as large as for one token; give"
                f" {measured}, or measure a prompt of {count_text(asked.prompt_tokens, 'token')}"
            )

    def _check_repeats(self) -> None:
        """Check that values are sent more or less often than once only where costs say so."""
        edge = next((edge for edge in self.profile.edges if edge.repeats != 1), None)
        if edge is None:
            return
        is_joint = (
            self.objective == "latency"
            and not self.is_training
            and self.constraints.contiguous is False
        )
        if not is_joint:
            raise ValueError(
                f"profile.edges: the value of {edge.source!r} has repeats {edge.repeats}, as in a "
                "joint profile of several models; ask for objective 'latency' with training=False "
                "and constraints.contiguous=False"
            )

    def _check_sizes(self) -> None:
        """Check the fields of the objective ``step``: equal layers, and sizes that fill a batch."""
        if self.objective != "step":
            only = {
                "profiles": self.profiles,
                "batch_size": self.batch_size,
                "schedule": self.schedule == "auto",
            }
            for name, given in {**only, "step_kind": self.step_kind != "isolated"}.items():
                if given:
                    raise ValueError(
                        f"{name}: only objective 'step' chooses it; the objective is "
                        f"{self.objective!r}: leave {name} out"
                    )
            return
        names = [layer.name for layer in self.profile.layers]
        for profile in self.profiles:
            if [
                layer.name for layer in profile.layers
            ] != names or profile.training != self.profile.training:
                raise ValueError(
                    f"profiles: the profile of {count_text(profile.batch_size, 'sample')} has other"
                    " layers, or another value of training, than the profile of"
                    f" {count_text(self.profile.batch_size, 'sample')}; measure all sizes alike"
                )
        sizes = [profile.batch_size for profile in (self.profile, *self.profiles)]
        refuse_duplicates("profiles: micro-batch of size", [str(size) for size in sizes])
        if not self.micro_batches():
            known = " or ".join(map(str, sorted(sizes)))
            raise ValueError(
                f"batch_size: {self.whole_batch_size} samples cannot be divided into micro-batches "
                f"of {known}; give a multiple, or a profile of another size (batch_sizes)"
            )
        profile, chunks = self.micro_batches()[-1]  # the largest number of micro-batches
        if chunks > MOST_CHUNKS_OF_A_STEP:
            raise ValueError(
                f"chunks: a batch is {chunks:,} micro-batches of "
                f"{count_text(profile.batch_size, 'sample')}, stages x {chunks:,} passes forwards; "
                f"objective 'step' simulates no more than {MOST_CHUNKS_OF_A_STEP:,} of a stage: "
                "give larger micro-batches"
            )

    def _check_replicas(self) -> None:
        """Check that the search for replicas applies to the objective and to training."""
        if self.replicas == "never":
            return
        if self.objective not in OBJECTIVES_OF_REPLICAS:
            asked = f"the objective is {self.objective!r}"
        elif not self.is_training:
            asked = "the request places inference"
        else:
            return
        raise ValueError(
            f"replicas is {self.replicas!r}, which only training under objectives 'step' and"
            f" 'throughput' uses; {asked}: leave replicas out"
        )

    def warn_of_one_size(self, options: SolveOptions) -> None:
        """Warn if the options do not say how large a batch of objective ``step`` is.

        The request then places a batch of one micro-batch of the largest measured size, which no
        pipeline makes faster.

        Args:
            options: what the user gave, from which this request was made.
        """
        if self.objective != "step" or {"batch_size", "chunks"} & options.model_fields_set:
            return
        samples = count_text(self.whole_batch_size, "sample")
        warn(
            f"objective 'step' places a batch of {samples}, as many as the largest micro-batch"
            " that is measured, because neither batch_size nor chunks is given; give batch_size,"
            " the samples of a whole batch"
        )

    def warn_of_hooks(self, layer_devices: Mapping[str, str]) -> None:
        """Warn if a pipeline was placed, but the model runs through hooks.

        Through hooks micro-batches run one after another, so the predicted speed-up is not reached.

        Args:
            layer_devices: the device of each layer, in the answer to this request.
        """
        overlaps = self.objective in ("throughput", "step", "devices")
        if self.profile.captured or not overlaps or len(set(layer_devices.values())) < 2:
            return
        warn(
            f"the model is not captured: {self.profile.not_captured_because}: micro-batches run one"
            " after another, so the split does not reach the speed-up that is predicted"
        )

    @property
    def may_rest(self) -> bool:
        """Return whether parameters may rest on the host or on its disk."""
        return self.host_memory_bytes is not None or self.disk_bytes is not None

    @property
    def computes_on_host(self) -> bool:
        """Return whether layers may be computed by the CPU of a host where parameters may rest."""
        copying = {device.host for device in self.devices if device.from_host is not None}
        return self.may_rest and any(
            device.is_host and device.host in copying for device in self.devices
        )

    def _check_resting(self) -> None:
        """Check that parameters may rest under the objective and the other options."""
        if not self.may_rest:
            return
        flight = self.generation.sequences_in_flight if self.generation is not None else 1
        if self.is_training:
            why = "the request places a training step"
        elif self.objective not in OBJECTIVES_OF_RESTING:
            why = f"the objective is {self.objective!r}"
        elif flight > 1:
            why = f"{flight} sequences are in flight"
        elif self.for_format is not None:
            why = f"format {self.for_format!r} cannot express it"
        elif self.break_ties:
            why = "break_ties compares other placements"
        else:
            self._refuse_experts()
            return
        name = "disk_bytes" if self.host_memory_bytes is None else "host_memory_bytes"
        raise ValueError(
            f"{name}: parameters rest off their device only in inference under objectives "
            f"'latency' and 'generation' with one sequence in flight; {why}: leave {name} out"
        )

    def _refuse_experts(self) -> None:
        """Raise a ValueError for experts outside of a generation, as other passes copy all."""
        mixed = next((layer for layer in self.profile.layers if layer.expert_bytes), None)
        if mixed is not None and self.objective != "generation":
            raise ValueError(
                f"profile: layer {mixed.name!r} has {mixed.expert_bytes} bytes of experts, of which"
                " only the passes of a generation copy the chosen ones alone; the objective is"
                f" {self.objective!r}: set expert_bytes to 0, or measure the model by"
                " placer.profile"
            )

    def _check_optimizer_state(self, cluster: Cluster) -> None:
        """Check that optimizer state may rest on the host, and that the cost of it is known."""
        if self.optimizer_state == "device":
            return
        given = f"optimizer_state is {self.optimizer_state!r}"
        if not self.is_training:
            raise ValueError(
                f"{given}, but the request places inference, which has no optimizer: leave "
                "optimizer_state out"
            )
        if self.for_format is not None:
            raise ValueError(
                f"{given}, and format {self.for_format!r} cannot express state on the host: leave "
                "optimizer_state or for_format out"
            )
        for device in cluster.devices:
            if device.to_host is None or device.from_host is None:
                raise ValueError(
                    f"{given}, but device {device.name!r} has no measured rates to_host and "
                    "from_host: measure the devices again, give the rates, or leave "
                    "optimizer_state out"
                )

    def _check_pins(self, cluster: Cluster) -> None:
        """Check that no pin contradicts a ban, a group, or a missing link."""
        rules, everywhere = self.constraints, self.constraints.forbidden.get("*", ())
        pinned = rules.pinned
        for layer, device in pinned.items():
            if device in (*rules.forbidden.get(layer, ()), *everywhere):
                raise ValueError(
                    f"constraints.pinned: layer {layer!r} is pinned to {device!r}, which is "
                    "forbidden for it; leave out one of the two"
                )
        for group in (*self.profile.colocated, *rules.colocated) if pinned else ():
            if pins := pins_apart(pinned, group):
                raise ValueError(
                    f"constraints.pinned: colocated layers are pinned apart, {pins}; pin them "
                    "to one device"
                )
        linked = (
            {(link.source, link.target) for link in cluster.links} if len(pinned) > 1 else set()
        )
        for edge in self.profile.edges if len(pinned) > 1 else ():
            if edge.repeats:
                self._check_way(edge, linked)

    def _check_way(self, edge: Edge, linked: set[tuple[str, str]]) -> None:
        """Check that a value between pinned layers, and its gradient, has a link."""
        pinned = self.constraints.pinned
        for target in edge.targets if edge.source in pinned else ():
            here, there = pinned[edge.source], pinned.get(target, pinned[edge.source])
            # a gradient needs the link in the opposite direction
            back = self.is_training and edge.gradient_bytes > 0
            for way in ((here, there), (there, here))[: 1 + back] if here != there else ():
                if way not in linked:
                    raise ValueError(
                        f"constraints.pinned: {edge.source!r} on {here!r} makes a value that "
                        f"{target!r} reads on {there!r}, but cluster.links has no link from "
                        f"{way[0]!r} to {way[1]!r}; give the link, or change a pin"
                    )

    def _check_numbers(self, devices: int, layers: int) -> None:
        """Check that the demanded devices exist, may be used, and have a layer each."""
        least, most = self.constraints.min_devices, self.constraints.max_devices
        there = {
            f"the cluster has {count_text(devices, 'device')}": devices,
            f"constraints.max_devices is {most}": most,
            f"the model has {count_text(layers, 'layer')}, and each device needs one": layers,
        }
        for what, number in there.items():
            if least is not None and number is not None and least > number:
                raise ValueError(
                    f"constraints.min_devices is {least}, but {what}; give {number} or less"
                )

    def _check_times(self, profile: Profile, cluster: Cluster) -> None:
        trains = self.is_training
        for kind in {device.type for device in cluster.devices}:
            for layer in profile.layers:
                if kind not in layer.forward_ms:
                    raise ValueError(
                        f"layer {layer.name!r} has no forward_ms for device type {kind!r}; profile "
                        "on a device of this type, or leave its devices out"
                    )
                if trains and kind not in layer.backward_ms:
                    raise ValueError(
                        f"layer {layer.name!r} has no backward_ms for device type {kind!r}; "
                        "profile a training step on a device of this type, or leave its devices out"
                    )

    @property
    def is_training(self) -> bool:
        """Return whether a training step is placed."""
        return self.profile.training if self.training is None else self.training

    @property
    def whole_batch_size(self) -> int:
        """Return the number of samples in a whole batch."""
        return self.batch_size or self.chunks * self.profile.batch_size

    def micro_batches(self) -> list[tuple[Profile, int]]:
        """Return the profiles whose micro-batches fill the batch, with their number, ascending."""
        whole = self.whole_batch_size
        # large micro-batches first: they give the fewest
        profiles = sorted((self.profile, *self.profiles), key=lambda profile: -profile.batch_size)
        return [
            (profile, whole // profile.batch_size)
            for profile in profiles
            if whole % profile.batch_size == 0
        ]

    @property
    def devices(self) -> tuple[Device, ...]:
        """Return the devices to place on."""
        return self.placed_on.devices

    @property
    def placed_on(self) -> Cluster:
        """Return the cluster to place on: the request's, or else the profile's."""
        cluster = self.cluster or self.profile.cluster
        assert cluster is not None  # the validator refused it
        return cluster

    def content_hash(self) -> str:
        """Return a hash of the request, independent of its JSON form: 32 hexadecimal digits."""
        # fields serialise in declared order, and dictionaries are sorted by validators
        return hashlib.sha256(self.__pydantic_serializer__.to_json(self)).hexdigest()[:32]


def pins_apart(pinned: Mapping[str, str], group: Sequence[str]) -> str:
    """Return two pins of layers of a group to different devices, as text; empty without them."""
    # one entry per device: two entries are two different pins in one group
    ends = {pinned[layer]: layer for layer in group if layer in pinned}
    if len(ends) < 2:
        return ""
    return " and ".join(f"{layer!r} to {device!r}" for device, layer in list(ends.items())[:2])


def _refuse_other_passes(prompt: Profile, token: Profile) -> None:
    """Raise a ValueError if a profile of a one-token pass does not belong to a prompt's profile."""
    place = {layer.name: index for index, layer in enumerate(prompt.layers)}
    names = [layer.name for layer in token.layers]
    strange = next((name for name in names if name not in place), None)
    if strange is not None or len(names) < len(place):
        name = strange or next(name for name in place if name not in names)
        raise ValueError(
            f"token_profile: layer {name!r} is in one of the two profiles alone; measure both "
            "passes with the same layers"
        )
    if token.batch_size != prompt.batch_size:
        raise ValueError(
            f"token_profile: it has {count_text(token.batch_size, 'sample')} and the prompt's "
            f"profile {prompt.batch_size}; measure both with as many"
        )
    for layer in token.layers:
        _refuse_another_layer(prompt.layers[place[layer.name]], layer)
    for edge in token.edges:
        for target in edge.targets:
            if place[target] <= place[edge.source]:
                raise ValueError(
                    f"token_profile: the value from {edge.source!r} to {target!r} runs against the "
                    "order of the layers in the prompt's profile; measure both passes in one order"
                )


def _refuse_another_layer(before: Layer, layer: Layer) -> None:
    """Raise a ValueError if a layer of a one-token pass differs from the prompt's layer."""
    if layer.expert_bytes != before.expert_bytes:
        raise ValueError(
            f"token_profile: layer {layer.name!r} has {layer.expert_bytes} bytes of experts, "
            f"and {before.expert_bytes} in the prompt's profile; measure both passes of one "
            "model"
        )
    if layer.param_bytes != before.param_bytes or layer.buffer_bytes < before.buffer_bytes:
        raise ValueError(
            f"token_profile: layer {layer.name!r} has {layer.param_bytes} bytes of parameters "
            f"and {layer.buffer_bytes} of buffers, in the prompt's profile "
            f"{before.param_bytes} and {before.buffer_bytes}; parameters must be equal, and "
            "buffers hold the cache in addition"
        )


def _measured_tokens(prompt: Profile, token: Profile) -> int | None:
    """Return the tokens of the prompt that was measured; None if the profiles do not show it.

    Most values between layers have a row for each token; masks and reduced values do not.
    """
    single = {(edge.source, frozenset(edge.targets)): edge.bytes for edge in token.edges}
    ratios = Counter(
        edge.bytes / size
        for edge in prompt.edges
        if (size := single.get((edge.source, frozenset(edge.targets))))
    )
    for ratio, count in ratios.most_common(1):
        if ratio > 1 and ratio.is_integer() and 2 * count > ratios.total():
            return int(ratio)
    return None


def _refuse_unreachable(cluster: Cluster) -> None:
    """Raise a ValueError for the first of several devices that has no link."""
    linked = {end for link in cluster.links for end in (link.source, link.target)}
    for device in cluster.devices if len(cluster.devices) > 1 else ():
        if device.name not in linked:
            raise ValueError(
                f"cluster.links: device {device.name!r} has no link with any other device, so no "
                "value can reach it; give its links, or leave it out"
            )
