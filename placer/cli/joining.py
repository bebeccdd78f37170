"""Profiles from several places: files that are merged, and hosts under torchrun."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from placer.cli.files import load_profile
from placer.cli.terminal import extra
from placer.errors import InputError
from placer.profiler.merge import merge_profiles
from placer.schema import Profile, Rate
from placer.utils.units import parse_bandwidth, parse_seconds


def merged(files: Sequence[str], network: str | None) -> Profile:
    """Return the profiles in the files, merged into one.

    Args:
        files: the names of the files; ``-`` for stdin.
        network: the link between two hosts, as ``rate`` reads it.

    Raises:
        InputError: a file holds something else, or the profiles do not belong together.
    """
    profiles = map(load_profile, files)
    return merge_profiles(*profiles, network=None if network is None else rate(network))


def rate(text: str) -> Rate:
    """Return a link between hosts, from ``BANDWIDTH[,LATENCY]``: ``100Gbit/s,20us``, ``12GB/s``.

    Raises:
        InputError: the text has another form.
    """
    bandwidth, _, latency = text.partition(",")
    return Rate(
        bandwidth_bytes_per_s=parse_bandwidth(bandwidth),
        latency_s=parse_seconds(latency) if latency.strip() else 0.0,
    )


def gathered(measure: Callable[[], Profile]) -> tuple[Profile, bool]:
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
