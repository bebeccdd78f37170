"""``placer profile``: measure a model here, or merge profiles of several hosts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from placer.cli.files import emit, load_profile
from placer.cli.option_fields import Words, expanded
from placer.cli.options import Measured, Printed, limited, limits, sample_counts
from placer.cli.terminal import extra, profiling_log, users_code
from placer.errors import InputError
from placer.profiler.merge import merge_profiles
from placer.schema import Profile, ProfileOptions, Rate
from placer.utils.units import parse_bandwidth, parse_seconds


@expanded(ProfileOptions)
def profile(
    model: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL",
            help="package.module:callable, as placer.zoo.resnet:resnet50; with --merge, profiles"
            " to join",
        ),
    ],
    measured: Measured,
    inference: Annotated[
        bool, typer.Option("--inference", help="measure inference instead of a training step")
    ] = False,
    batch_sizes: Annotated[
        str | None,
        typer.Option(
            metavar="4,8,16",
            help="micro-batch sizes to measure; with -o profile.json: profile-4.json, ...",
        ),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="join profiles of one model, made on different devices")
    ] = False,
    network: Annotated[
        str | None,
        typer.Option(
            metavar="BANDWIDTH[,LATENCY]",
            help="with --merge, the link between hosts: 100Gbit/s,20us",
        ),
    ] = None,
    gather: Annotated[
        bool,
        typer.Option(
            "--gather", help="under torchrun: every host measures its devices; the first prints all"
        ),
    ] = False,
    *,
    words: Words[ProfileOptions],
    printed: Printed,
) -> None:
    """Measure a model's layers on the devices: times, memory, and the bytes between them."""
    if batch_sizes is not None and (merge or gather):
        raise InputError(
            f"--batch-sizes {batch_sizes} does not go with {'--merge' if merge else '--gather'};"
            " leave one out"
        )
    if merge:
        between = None if network is None else _rate(network)
        found = merge_profiles(*map(load_profile, model), network=between)
        printed.emit(_limited(found, measured.memory))
        return
    if len(model) > 1 or network is not None:
        raise InputError(
            "several names, and --network, go with --merge; without it, name one model"
        )
    if batch_sizes is not None:
        sizes = sample_counts(batch_sizes)
        names = _names(printed.output, sizes, printed.json)
        profiles = _measure(model[0], measured, inference, words, sizes)
        for found, name in zip(profiles, names, strict=True):
            emit(found, name, as_json=False)
    elif gather:
        # The limits name devices of all hosts, which are known once the profiles are merged.
        alone = Measured(measured.arg, measured.input, measured.devices)
        merged_profile, is_first = _gathered(lambda: _measure(model[0], alone, inference, words)[0])
        if is_first:
            printed.emit(_limited(merged_profile, measured.memory))
    else:
        printed.emit(_measure(model[0], measured, inference, words)[0])


def _measure(
    spec: str,
    measured: Measured,
    inference: bool,
    words: Words[ProfileOptions],
    sizes: list[int] | None = None,
) -> list[Profile]:
    """Return the model's profile, or one for each micro-batch size."""
    with extra("torch"):
        from placer.profiler.profile import profile as profile_here
    devices = measured.names()
    options = words.read(devices)
    how: dict[str, Any] = {
        "training": not inference,
        "memory_bytes": limits(devices, measured.memory) or None,
        "options": options,
    }
    module, inputs = measured.load(spec)
    with profiling_log(), users_code():
        if sizes is not None:
            return profile_here(module, inputs, devices, batch_sizes=sizes, **how)
        return [profile_here(module, inputs, devices, **how)]


def _names(output: str | None, sizes: Sequence[int], as_json: bool) -> list[str | None]:
    """Return the file of each size, or None for a table on the terminal.

    Raises:
        InputError: stdout cannot hold several profiles.
    """
    if output is None and sys.stdout.isatty() and not as_json:
        return [None] * len(sizes)
    if output is None or output == "-" or as_json:
        raise InputError(
            "--batch-sizes writes a file for each size: give -o profile.json for profile-4.json and"
            " so on"
        )
    path = Path(output)
    return [str(path.with_name(f"{path.stem}-{size}{path.suffix}")) for size in sizes]


def _limited(measured: Profile, memory: Sequence[str]) -> Profile:
    if measured.cluster is None:
        return measured
    return measured.model_copy(update={"cluster": limited(measured.cluster, memory)})


def _rate(text: str) -> Rate:
    """Return a link between hosts, from ``BANDWIDTH[,LATENCY]``: ``100Gbit/s,20us``, ``12GB/s``.

    Raises:
        InputError: the text has another form.
    """
    bandwidth, _, latency = text.partition(",")
    return Rate(
        bandwidth_bytes_per_s=parse_bandwidth(bandwidth),
        latency_s=parse_seconds(latency) if latency.strip() else 0.0,
    )


def _gathered(measure: Callable[[], Profile]) -> tuple[Profile, bool]:
    """Measure every host, in the processes that torchrun started.

    Returns:
        The merged profile, and whether this process is the one that prints it.

    Raises:
        InputError: torchrun did not start this process.
        ProfilingError: a host could not measure.
    """
    with extra("torch"):
        import torch.distributed as dist

        from placer.profiler.remote.gather import gather_profile
    if not dist.is_torchelastic_launched():
        raise InputError(
            "--gather joins the processes that torchrun starts:"
            " torchrun ... -m placer profile ... --gather"
        )
    dist.init_process_group("gloo")
    try:
        return gather_profile(measure), dist.get_rank() == 0
    finally:
        dist.destroy_process_group()
