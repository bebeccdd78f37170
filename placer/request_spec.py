"""A placement request, as words on a command line.

cuda:0=8GiB        what a placement may use of a device (``8GiB`` alone: of each)
layer4=cuda:1      a layer and a device, for pins and bans; a device is a name or its index in the cluster
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from placer.errors import InputError
from placer.schema import (
    Cluster,
    Constraints,
    Device,
    Layer,
    Link,
    Objective,
    PlacementRequest,
    Profile,
    Recompute,
    ScheduleChoice,
    Steps,
    Transfers,
)
from placer.utils.units import parse_bytes

__all__ = ["blank_profiles", "layer_of", "limited", "request_for", "rules"]

WORDS: tuple[Recompute, ...] = ("never", "auto", "always")
"""Whether a device recomputes."""


def limited(cluster: Cluster, limits: list[str]) -> Cluster:
    """The cluster with what a placement may use of its devices set by hand.

    Args:
        cluster: as measured.
        limits: ``[DEVICE=]SIZE`` each; later ones win.

    Raises:
        InputError: there is no such device, or it is no size.
    """
    usable: dict[str, int] = {}
    for text in limits:
        name, _, size = text.rpartition("=")
        names = [_device(cluster, name)] if name else [device.name for device in cluster.devices]
        usable.update(dict.fromkeys(names, parse_bytes(size)))
    devices = [device.model_dump() for device in cluster.devices]
    for device in devices:
        if device["name"] in usable:
            device.update(memory_bytes=usable[device["name"]], reserve_bytes=0)
    return Cluster(devices=tuple(Device(**device) for device in devices), links=cluster.links)


def blank_profiles(
    training: bool,
    layers: Iterable[str] = (),
    devices: Iterable[str] = (),
    sizes: Iterable[int] = (1,),
) -> list[Profile]:
    """Profiles as they will be measured, as far as that is known before: to see whether a request
    can be made of them.

    What is wrong whatever is measured is told so before minutes of measuring. The layers, which are
    not known, are those that are asked about, and so many more that every device can have one.

    Args:
        training: whether they are of a training step.
        layers: that pins and others name.
        devices: that will be measured; one of any name if empty.
        sizes: of the micro-batches that will be measured.
    """
    names = list(dict.fromkeys(devices)) or ["device"]
    measured = dict.fromkeys([*layers, *(f"layer {number}" for number, _ in enumerate(names))])
    cluster = Cluster(
        devices=tuple(Device(name=name, type="any", memory_bytes=1) for name in names),
        links=tuple(
            Link(source=names[0], target=name, bandwidth_bytes_per_s=1.0) for name in names[1:]
        ),
    )
    rows = tuple(
        Layer(name=name, forward_ms={"any": 1.0}, backward_ms={"any": 1.0}) for name in measured
    )
    return [
        Profile(layers=rows, cluster=cluster, training=training, batch_size=size) for size in sizes
    ]


def _device(cluster: Cluster, name: str) -> str:
    """The name of a device that was given by name or by its index in the cluster."""
    names = [device.name for device in cluster.devices]
    if name.isdecimal() and int(name) < len(names):
        return names[int(name)]
    if name not in names:
        raise InputError(f"there is no device {name!r}; the cluster has {', '.join(names)}")
    return name


def rules(
    cluster: Cluster,
    pins: list[str],
    forbidden: list[str],
    max_devices: int | None,
    contiguous: bool | None,
    min_devices: int | None = None,
    max_layers: int | None = None,
    recompute: bool = False,
    recompute_on: Sequence[str] = (),
) -> Constraints:
    """What the placement must respect.

    Args:
        cluster: whose devices are named.
        pins: ``LAYER=DEVICE`` each: the layer must be there.
        forbidden: ``LAYER=DEVICE`` each: the layer must not be there; a layer of ``*`` stands for
            every layer.
        max_devices: use at most so many.
        contiguous: as in ``Constraints``.
        min_devices: use at least so many.
        max_layers: no device holds more layers.
        recompute: whether devices may run forwards once more where memory would not do otherwise.
        recompute_on: ``DEVICE=never``, ``DEVICE=auto`` or ``DEVICE=always`` each: whether that
            device does.

    Raises:
        InputError: one is not of that form, or there is no such device.
    """
    banned: dict[str, tuple[str, ...]] = {}
    for layer, device in (_pair(cluster, text) for text in forbidden):
        banned[layer] = (*banned.get(layer, ()), device)
    pinned: dict[str, str] = {}
    for layer, device in (_pair(cluster, text) for text in pins):
        if pinned.setdefault(layer, device) != device:
            raise InputError(
                f"layer {layer!r} is pinned to {pinned[layer]} and to {device}; pin it to one"
            )
    return Constraints(
        pinned=pinned,
        forbidden=banned,
        max_devices=max_devices,
        min_devices=min_devices,
        max_layers=max_layers,
        contiguous=contiguous,
        recompute=_recompute(cluster, "auto" if recompute else "never", recompute_on),
    )


def _recompute(
    cluster: Cluster, others: Recompute, by_device: Sequence[str]
) -> Recompute | dict[str, Recompute]:
    """One word for all devices, or a word for each that is named and one for the others."""
    if not by_device:
        return others
    words: dict[str, Recompute] = {"*": others}
    for text in by_device:
        device, _, asked = text.rpartition("=")
        word = next((word for word in WORDS if word == asked), None)
        if word is None or not device:
            raise InputError(
                f"{text!r} is no device and one of {', '.join(WORDS)}; write cuda:1=always"
            )
        words[_device(cluster, device)] = word
    return words


def _pair(cluster: Cluster, text: str) -> tuple[str, str]:
    layer, device = _split(text)
    return layer, _device(cluster, device)


def layer_of(text: str) -> str:
    """The layer that a pin or a ban names, as for ``rules``; ``*`` for every layer.

    Raises:
        InputError: it names no layer and device.
    """
    return _split(text)[0]


def _split(text: str) -> tuple[str, str]:
    layer, equals, device = text.rpartition("=")
    if not equals or not layer:
        raise InputError(
            f"{text!r} names no layer and device; write LAYER=DEVICE, as in layer4=cuda:1"
        )
    return layer, device


def request_for(
    profile: Profile,
    cluster: Cluster,
    constraints: Constraints,
    objective: str,
    chunks: int,
    schedule: str | None,
    transfers: str,
    time_limit_s: float,
    explain: bool = False,
    batch_size: int | None = None,
    profiles: Sequence[Profile] = (),
    break_ties: bool = False,
    bottleneck_ms: float | None = None,
    work_limit: float | None = None,
    steps: str | None = None,
) -> PlacementRequest:
    """The request; its fields are those of ``PlacementRequest``.

    Where the schedule is None it is chosen under objective ``step``, else 1F1B. Where ``steps`` is
    None training steps are in a row, under objective ``step``; else they are alone.

    Raises:
        InputError: a word is not known, or the parts contradict each other.
    """
    loop = objective == "step" and profile.training
    return PlacementRequest(
        profile=profile,
        profiles=tuple(profiles),
        batch_size=batch_size,
        cluster=cluster,
        constraints=constraints,
        objective=cast(Objective, objective),  # pydantic refuses what is none
        chunks=chunks,
        schedule=cast(ScheduleChoice, schedule or ("auto" if objective == "step" else "1f1b")),
        steps=cast(Steps, steps or ("in-a-row" if loop else "alone")),
        transfers=cast(Transfers, transfers),
        time_limit_s=time_limit_s,
        explain=explain,
        break_ties=break_ties,
        bottleneck_ms=bottleneck_ms,
        work_limit=work_limit,
    )
