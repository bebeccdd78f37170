"""``placer profile``: measure a model here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from placer.cli.files import emit
from placer.cli.joining import gathered, merged
from placer.cli.options import (
    Arguments,
    AsJson,
    CacheFolder,
    Devices,
    Granularity,
    Inference,
    Inputs,
    Loss,
    Memory,
    NoCache,
    Optimizer,
    Output,
    Target,
)
from placer.cli.terminal import extra, told, users_code
from placer.errors import InputError
from placer.request_spec import limited
from placer.schema import Profile


def profile(
    model: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL",
            help="package.module:callable, as placer.zoo.resnet:resnet50; with --merge, profiles to join",
        ),
    ],
    arg: Arguments = [],  # noqa: B006
    input: Inputs = [],  # noqa: B006
    devices: Devices = None,
    memory: Memory = [],  # noqa: B006
    inference: Inference = False,
    optimizer: Optimizer = "adam",
    granularity: Granularity = "auto",
    cache: CacheFolder = None,
    no_cache: NoCache = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="join profiles of one model, made on different devices")
    ] = False,
    network: Annotated[
        str | None,
        typer.Option(
            metavar="BANDWIDTH[,LATENCY]",
            help="with --merge, the way between hosts: 100Gbit/s,20us",
        ),
    ] = None,
    loss: Loss = None,
    target: Target = None,
    batch_sizes: Annotated[
        str | None,
        typer.Option(
            metavar="4,8,16",
            help="micro-batch sizes to measure; with -o profile.json: profile-4.json, ...",
        ),
    ] = None,
    gather: Annotated[
        bool,
        typer.Option(
            "--gather", help="under torchrun: every host measures its devices; the first tells all"
        ),
    ] = False,
    output: Output = None,
    json: AsJson = False,
) -> None:
    """Measure a model's layers on the devices: times, memory, and the bytes between them."""
    if batch_sizes is not None and (merge or gather):
        raise InputError(
            f"--batch-sizes {batch_sizes} does not go with {'--merge' if merge else '--gather'}; leave one out"
        )
    if merge:
        emit(_limited(merged(model, network), memory), output, json)
        return
    if len(model) > 1 or network is not None:
        raise InputError(
            "several names, and --network, go with --merge; without it, name one model"
        )
    given = (
        model[0],
        arg,
        input,
        devices,
        [] if gather else memory,
        inference,
        optimizer,
        granularity,
    )
    keep, lost = cached(cache, no_cache), loss_of(loss, target)
    if batch_sizes is not None:
        sizes = _sizes(batch_sizes)
        names = _names(output, sizes, json)
        for found, name in zip(measure_sizes(*given, keep, sizes, **lost), names, strict=True):
            emit(found, name, as_json=False)
        return
    if not gather:
        emit(measure(*given, keep, **lost), output, json)
        return
    found, is_first = gathered(lambda: measure(*given, keep, **lost))
    if is_first:
        emit(_limited(found, memory), output, json)


def measure(
    model: str,
    arguments: list[str],
    inputs: list[str],
    devices: str | None,
    memory: list[str],
    inference: bool,
    optimizer: str,
    granularity: str,
    cache: str | bool,
    **loss: Any,
) -> Profile:
    """Profile the model that the words of a command line name, with the loss if there is one."""
    given = (model, arguments, inputs, devices, memory, inference, optimizer, granularity, cache)
    return measure_sizes(*given, None, **loss)[0]


@users_code()
def measure_sizes(
    model: str,
    arguments: list[str],
    inputs: list[str],
    devices: str | None,
    memory: list[str],
    inference: bool,
    optimizer: str,
    granularity: str,
    cache: str | bool,
    sizes: list[int] | None,
    **loss: Any,
) -> list[Profile]:
    """The same at several micro-batch sizes; at the inputs' own if None."""
    with extra("torch"):
        from placer.model_spec import load_model
        from placer.profiler.profile import profile as profile_here
    module = load_model(model, arguments)
    common: dict[str, Any] = {
        "training": not inference,
        "optimizer": None if optimizer == "none" else optimizer,
        "granularity": int(granularity) if granularity.isdecimal() else granularity,
        "cache": cache,
    }
    example = example_of(module, inputs)
    with told():
        measured = profile_here(
            module, example, _devices(devices), **common, **loss, batch_sizes=sizes
        )
    return as_limited(measured if isinstance(measured, list) else [measured], memory)


def _sizes(text: str) -> list[int]:
    """The micro-batch sizes that a command line names, the smallest first."""
    sizes = sample_counts(text)
    if sizes is None or len(set(sizes)) < len(sizes):
        raise InputError(
            f"--batch-sizes {text!r}: give different numbers of samples, each at least 1, as in 4,8,16"
        )
    return sizes


def sample_counts(text: str) -> list[int] | None:
    """Numbers of samples between commas, the smallest first; None where one is no number or is
    below 1.
    """
    counts = [count.strip() for count in text.split(",")]
    return (
        sorted(map(int, counts))
        if all(count.isdecimal() and int(count) for count in counts)
        else None
    )


def _names(output: str | None, sizes: Sequence[int], as_json: bool) -> list[str | None]:
    """The file of each size: that which was named, with the size; none on a terminal, where tables
    are shown.
    """
    if output is None and sys.stdout.isatty() and not as_json:
        return [None] * len(sizes)
    if output is None or output == "-" or as_json:
        raise InputError(
            "--batch-sizes writes a file for each: give -o profile.json for profile-4.json and so on"
        )
    path = Path(output)
    return [str(path.with_name(f"{path.stem}-{size}{path.suffix}")) for size in sizes]


def as_limited(measured: list[Profile], memory: list[str]) -> list[Profile]:
    """Profiles with what a placement may use of their devices set by hand, see ``limited``."""
    return [_limited(one, memory) for one in measured]


def _limited(measured: Profile, memory: list[str]) -> Profile:
    if measured.cluster is None:
        return measured
    return measured.model_copy(update={"cluster": limited(measured.cluster, memory)})


def cached(folder: str | None, off: bool) -> str | bool:
    """The cache that the options name."""
    if off and folder is not None:
        raise InputError(f"--no-cache and --cache {folder} contradict each other; give one")
    return not off if folder is None else folder


@users_code()
def loss_of(loss: str | None, target: str | None) -> dict[str, Any]:
    """The loss and its target that a command line names, as arguments; a loss may be without one."""
    if target is not None and (loss is None or "=" in target):
        raise InputError(
            f"--target {target} goes with --loss, whose second argument it is; give both, as in 8:int64"
        )
    if loss is None:
        return {}
    with extra("torch"):
        from placer.model_spec import load_function, parse_inputs
    (goal,) = (None,) if target is None else tuple(parse_inputs([target]))
    return {"loss_fn": load_function(loss), "target": goal}


def devices_of(text: str | None) -> list[str]:
    """The names of the devices that a command line names; of all that there are, if None."""
    with extra("torch"):
        from placer.devices import resolve
    return [str(device) for device in resolve(_devices(text))]


def sizes_of(inputs: list[str], sizes: list[int] | None) -> list[int]:
    """Samples in each micro-batch that will be measured, as far as that is known without the model."""
    if sizes is not None or not inputs:
        return sizes or [1]
    from placer.model_spec import parse_inputs
    from placer.profiler.profile_inputs import sizes as sizes_of_inputs

    return sizes_of_inputs(parse_inputs(inputs), None)


def example_of(module: Any, inputs: list[str]) -> Any:
    """The example inputs that a command line tells, or that the model carries."""
    from placer.model_spec import parse_inputs
    from placer_client.suggest import _carried_inputs

    if inputs:
        return parse_inputs(inputs)
    try:
        return _carried_inputs(module)
    except InputError as error:
        kind = type(module).__name__
        raise InputError(
            f"{kind} carries no example inputs; give each with --input, as in 8x3x224x224"
        ) from error


def _devices(text: str | None) -> int | list[str] | None:
    if text is None:
        return None
    return int(text) if text.isdecimal() else [name.strip() for name in text.split(",")]
