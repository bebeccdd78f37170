"""Options that several commands of ``placer`` share, groups of them, and readers of their words.

cuda:0=8GiB       the memory that a placement may use of a device (8GiB alone: of each device)
layer4=cuda:1     a layer and a device; a device is a name or its index in the cluster
cuda:1=always     a device, and whether it recomputes
4,8,16            micro-batch sizes
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import typer

from placer.cli.files import Answer, emit
from placer.cli.terminal import extra, users_code
from placer.errors import InputError
from placer.schema import Cluster, Device, GenerationOptions, Recompute
from placer.utils.units import parse_bytes

Written = TypeVar("Written", str, Path, None)


def in_a_folder(output: Written) -> Written:
    """Return where to write; refuse what is no file before minutes of work are lost.

    Raises:
        InputError: the folder does not exist, or it is named without a file.
    """
    if output is not None and output != "-":
        if not os.path.isdir(Path(output).parent):
            raise InputError(f"cannot write {output}: there is no folder {Path(output).parent}")
        if os.path.isdir(output):
            raise InputError(f"cannot write {output}: it is a folder; name a file in it")
    return output


Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="package.module:callable, as placer.zoo.resnet:resnet50"),
]
Memory = Annotated[
    list[str],
    typer.Option(
        "--memory",
        metavar="[DEVICE=]SIZE",
        help="memory that a placement may use of a device, or of each: 8GiB; repeatable",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON on a terminal too")]
Server = Annotated[
    str | None,
    typer.Option(
        metavar="URL", envvar="PLACER_URL", help="ask this service; solve here if left out"
    ),
]


@dataclass(frozen=True)
class Example:
    """The arguments of the model's callable, and the example inputs."""

    arg: Annotated[
        list[str],
        typer.Option("--arg", metavar="KEY=VALUE", help="an argument of the callable; repeatable"),
    ] = field(default_factory=list)
    input: Annotated[
        list[str],
        typer.Option(
            "--input",
            "-i",
            metavar="[NAME=]SHAPE[:DTYPE]",
            help="an example input, as 8x3x224x224 or ids=2x16:int64; repeatable",
        ),
    ] = field(default_factory=list)

    @users_code()
    def load(self, spec: str, on_meta: bool = False, with_inputs: bool = True) -> tuple[Any, Any]:
        """Return the model that a command line names, and its example inputs.

        Args:
            spec: ``package.module:callable``.
            on_meta: make the model on ``meta`` where possible, without memory for its weights.
            with_inputs: whether inputs are needed; else they are None if none are given.

        Raises:
            InputError: there is no such model, or it carries no example inputs and none are given.
        """
        with extra("torch"):
            from placer.capture.input_forms import carried_inputs
            from placer.cli.model_arguments import load_model, parse_inputs

        def make() -> Any:
            return load_model(spec, self.arg)

        if on_meta:
            from placer.estimator.meta_models import made_on_meta

            module = made_on_meta(make)
        else:
            module = make()
        if self.input:
            return module, parse_inputs(self.input)
        if not with_inputs:
            return module, None
        try:
            return module, carried_inputs(module, "suggest")
        except InputError as error:
            kind = type(module).__name__
            raise InputError(
                f"{kind} carries no example inputs; give each with --input, as in 8x3x224x224"
            ) from error


@dataclass(frozen=True)
class Places:
    """The devices to place on, and their memory."""

    devices: Annotated[
        str | None,
        typer.Option(help="a number, or names: cuda:0,cuda:1 or cpu:0,cpu:1; by default all"),
    ] = None
    memory: Memory = field(default_factory=list)

    def names(self) -> list[str]:
        """Return the names of the devices.

        Raises:
            InputError: a device does not exist.
        """
        with extra("torch"):
            from placer.devices import resolve
        return [str(device) for device in resolve(device_list(self.devices))]


@dataclass(frozen=True)
class Measured(Places, Example):
    """An example, and the devices to measure it on."""


@dataclass(frozen=True)
class Printed:
    """Where the answer goes: a file, stdout as JSON, or a table on a terminal."""

    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            callback=in_a_folder,
            help="write the JSON to this file; - for stdout",
        ),
    ] = None
    json: AsJson = False

    def emit(self, answer: Answer) -> None:
        """Write the answer."""
        emit(answer, self.output, self.json)


def limits(names: Sequence[str], texts: Sequence[str]) -> dict[str, int]:
    """Return the bytes that a placement may use, by device.

    Args:
        names: the devices of the cluster.
        texts: ``[DEVICE=]SIZE`` each; a later one wins.

    Raises:
        InputError: there is no such device, or a text holds no size.
    """
    usable: dict[str, int] = {}
    for text in texts:
        name, _, size = text.rpartition("=")
        limited_devices = [device_named(names, name)] if name else names
        usable.update(dict.fromkeys(limited_devices, parse_bytes(size)))
    return usable


def limited(cluster: Cluster, texts: Sequence[str]) -> Cluster:
    """Return the cluster with the memory that a placement may use of its devices.

    Raises:
        InputError: there is no such device, or a text holds no size.
    """
    usable = limits([device.name for device in cluster.devices], texts)
    devices = [device.model_dump() for device in cluster.devices]
    for device in devices:
        if device["name"] in usable:
            device.update(memory_bytes=usable[device["name"]], reserve_bytes=0)
    return Cluster(devices=tuple(Device(**device) for device in devices), links=cluster.links)


def generation(
    prompt_tokens: int | None, new_tokens: int | None, sequences_in_flight: int | None
) -> GenerationOptions:
    """Return what is generated.

    Raises:
        InputError: a number is missing or too small.
    """
    words = {"--prompt-tokens": prompt_tokens, "--new-tokens": new_tokens}
    for word, given in words.items():
        if given is None:
            raise InputError(f"{word} is missing; give it with --objective generation")
    return GenerationOptions.model_validate(
        {
            "prompt_tokens": prompt_tokens,
            "new_tokens": new_tokens,
            "sequences_in_flight": 1 if sequences_in_flight is None else sequences_in_flight,
        }
    )


def device_named(names: Sequence[str], word: str) -> str:
    """Return the name of a device that is given by name or by its index in the cluster.

    Raises:
        InputError: there is no such device.
    """
    if word.isdecimal() and int(word) < len(names):
        return names[int(word)]
    if word not in names:
        raise InputError(f"there is no device {word!r}; the cluster has {', '.join(names)}")
    return word


def pins(names: Sequence[str], texts: Sequence[str]) -> dict[str, str]:
    """Return the device of each pinned layer, from ``LAYER=DEVICE`` each.

    Raises:
        InputError: a text has another form, there is no such device, or a layer is pinned twice.
    """
    pinned: dict[str, str] = {}
    for layer, device in (_pair(names, text) for text in texts):
        if pinned.setdefault(layer, device) != device:
            raise InputError(
                f"layer {layer!r} is pinned to {pinned[layer]} and to {device}; pin it to one"
            )
    return pinned


def bans(names: Sequence[str], texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the forbidden devices of each layer, from ``LAYER=DEVICE`` each.

    Raises:
        InputError: a text has another form, or there is no such device.
    """
    banned: dict[str, tuple[str, ...]] = {}
    for layer, device in (_pair(names, text) for text in texts):
        banned[layer] = (*banned.get(layer, ()), device)
    return banned


def recomputing(
    names: Sequence[str], others: bool, by_device: Sequence[str]
) -> Recompute | dict[str, Recompute]:
    """Return which devices recompute: one word for all, or a word for each device.

    Args:
        names: the devices of the cluster.
        others: whether devices that are not named may recompute.
        by_device: ``DEVICE=never``, ``DEVICE=auto`` or ``DEVICE=always`` each.

    Raises:
        InputError: a text has another form, or there is no such device.
    """
    default: Recompute = "auto" if others else "never"
    if not by_device:
        return default
    words: dict[str, Recompute] = {"*": default}
    for text in by_device:
        device, _, rule = text.rpartition("=")
        word = next((word for word in get_args(Recompute) if word == rule), None)
        if word is None or not device:
            raise InputError(
                f"{text!r} is not DEVICE=WORD with a word of {', '.join(get_args(Recompute))};"
                " write cuda:1=always"
            )
        words[device_named(names, device)] = word
    return words


def sample_counts(text: str) -> list[int]:
    """Return micro-batch sizes in samples, the smallest first, from ``4,8,16``.

    Raises:
        InputError: one is not a number, is below 1, or is listed twice.
    """
    counts = [count.strip() for count in text.split(",")]
    if not all(count.isdecimal() and int(count) for count in counts) or len(
        {int(count) for count in counts}
    ) < len(counts):
        raise InputError(
            f"--batch-sizes {text!r}: give different numbers of samples, each at least 1, as in"
            " 4,8,16"
        )
    return sorted(map(int, counts))


def device_list(text: str | None) -> int | list[str] | None:
    """Return the devices that ``--devices`` names: a number, names, or None for all."""
    if text is None:
        return None
    return int(text) if text.isdecimal() else [name.strip() for name in text.split(",")]


def cache_folder(folder: str | None, off: bool) -> str | bool:
    """Return the cache that ``--cache`` and ``--no-cache`` name.

    Raises:
        InputError: both are given.
    """
    if off and folder is not None:
        raise InputError(f"--no-cache and --cache {folder} contradict each other; give one")
    return not off if folder is None else folder


def goal(target: str | None, loss: str | None) -> Any:
    """Return a random target for the loss, from ``SHAPE[:DTYPE]``.

    Raises:
        InputError: a target is given without a loss, or has another form.
    """
    if target is None:
        return None
    if loss is None or "=" in target:
        raise InputError(
            f"--target {target} goes with --loss, whose second argument it is; give both, as in"
            " 8:int64"
        )
    from placer.cli.model_arguments import parse_inputs

    return next(iter(parse_inputs([target])))


def _pair(names: Sequence[str], text: str) -> tuple[str, str]:
    layer, equals, device = text.rpartition("=")
    if not equals or not layer:
        raise InputError(
            f"{text!r} names no layer and device; write LAYER=DEVICE, as in layer4=cuda:1"
        )
    return layer, device_named(names, device)
