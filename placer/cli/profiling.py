"""``placer profile``: measure a model here."""

from __future__ import annotations

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
    Memory,
    NoCache,
    Optimizer,
    Output,
)
from placer.cli.terminal import extra, told
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
        typer.Option(metavar="BANDWIDTH[,LATENCY]", help="with --merge, the way between hosts: 100Gbit/s,20us"),
    ] = None,
    gather: Annotated[
        bool, typer.Option("--gather", help="under torchrun: every host measures its devices; the first tells all")
    ] = False,
    output: Output = None,
    json: AsJson = False,
) -> None:
    """Measure a model's layers on the devices: times, memory, and the bytes between them."""
    if merge:
        emit(_limited(merged(model, network), memory), output, json)
        return
    if len(model) > 1 or network is not None:
        raise InputError("several names, and --network, go with --merge; without it, name one model")
    given = (model[0], arg, input, devices, [] if gather else memory, inference, optimizer, granularity)
    keep = cached(cache, no_cache)
    if not gather:
        emit(measure(*given, keep), output, json)
        return
    found, is_first = gathered(lambda: measure(*given, keep))
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
) -> Profile:
    """Profile the model that the words of a command line name."""
    return measure_sizes(model, arguments, inputs, devices, memory, inference, optimizer, granularity, cache, None)[0]


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
        measured = profile_here(module, example, _devices(devices), **common, batch_sizes=sizes)
    return [_limited(one, memory) for one in (measured if isinstance(measured, list) else [measured])]


def _limited(measured: Profile, memory: list[str]) -> Profile:
    if measured.cluster is None:
        return measured
    return measured.model_copy(update={"cluster": limited(measured.cluster, memory)})


def cached(folder: str | None, off: bool) -> str | bool:
    """The cache that the options name."""
    if off and folder is not None:
        raise InputError(f"--no-cache and --cache {folder} contradict each other; give one")
    return not off if folder is None else folder


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
        raise InputError(f"{kind} carries no example inputs; give each with --input, as in 8x3x224x224") from error


def _devices(text: str | None) -> int | list[str] | None:
    if text is None:
        return None
    return int(text) if text.isdecimal() else [name.strip() for name in text.split(",")]
