"""One profile of several hosts, each measured by one of its processes under torchrun.

    node7: rank 0 ── profile ─┐                        ┌─▶ every rank: the merged profile
    node7: rank 1 ── waits    ├─ gather, merge ────────┤
    node9: rank 2 ── profile ─┘   and the network      └─▶
                                  between 0 and 2

The network is measured between the hosts' memories, one pair at a time, and verified.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from placer import devices
from placer.errors import InputError, ProfilingError
from placer.profiler.links.link_probe import HOST_SIZES, fit, pattern
from placer.profiler.merge import merge_profiles
from placer.schema import Profile, Rate

__all__ = ["gather_profile"]

_REPEATS = 5


def gather_profile(measure: Callable[[], Profile]) -> Profile:
    """Measure all hosts concurrently, and return the merged profile in every process.

    Call it in every process, as ``gather_profile(lambda: placer.profile(model, inputs))``. The
    first process of each host measures that host's devices; its other processes wait.

    Args:
        measure: returns the profile of one host's devices.

    Returns:
        The merged profile, with a link for every pair of devices on different hosts.

    Raises:
        InputError: if torch.distributed is not initialised.
        ProfilingError: if a host failed, or the network corrupts bytes; raised in every process.
        ProfileError: if the hosts measured different models.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise InputError(
            "torch.distributed was not started: run under torchrun, and call "
            "torch.distributed.init_process_group first"
        )
    # gloo: the network is measured between host memories, whatever backend the user has
    group = dist.new_group(backend="gloo")
    hosts: list[str] = _all(devices.host_name(), group)
    leaders = {host: hosts.index(host) for host in hosts}
    # the first process of each host measures; the others would disturb it
    mine = leaders[hosts[dist.get_rank()]] == dist.get_rank()
    profile, failure = _tried(measure) if mine else (None, "")
    found = _all((profile and profile.to_json(), failure), group)
    for host, (_, wrong) in zip(hosts, found, strict=True):
        if wrong:
            raise ProfilingError(f"host {host} could not measure: {wrong}")
    network = _network(leaders, group)
    profiles = [Profile.model_validate_json(text) for text, _ in found if text]
    return merge_profiles(*profiles, network=network)


def _tried(measure: Callable[[], Profile]) -> tuple[Profile | None, str]:
    """Return a profile, or the error text: the other processes must learn of the failure."""
    try:
        return measure(), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _all(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, mine, group=group)
    return gathered


def _network(leaders: dict[str, int], group: dist.ProcessGroup) -> dict[tuple[str, str], Rate]:
    """Return the rate between every two hosts by (source, target), measured one at a time."""
    rates: dict[tuple[str, str], Rate] = {}
    wrong = 0
    for source, sender in leaders.items():
        for target, receiver in leaders.items():
            if source == target:
                continue
            if dist.get_rank() == sender:
                rates[source, target], wrong = _send(receiver, group)
            elif dist.get_rank() == receiver:
                _receive(sender, group)
            spoilt = max(_all(wrong, group))
            if spoilt:
                raise ProfilingError(
                    f"the network {source} -> {target} changes bytes: {spoilt} of "
                    f"{HOST_SIZES[-1]}; leave one host out"
                )
    return {pair: rate for found in _all(rates, group) for pair, rate in found.items()}


def _send(receiver: int, group: dist.ProcessGroup) -> tuple[Rate, int]:
    """Return the rate to another process, and the number of corrupted bytes."""
    times = {}
    # one byte measures the latency of a round trip
    for size in (1, *HOST_SIZES):
        sent = pattern(size)
        times[size] = min(_round_trip(sent, receiver, group)[0] for _ in range(_REPEATS))
    changed = _round_trip(pattern(HOST_SIZES[-1]), receiver, group)[1]
    #     sender   ── size bytes ──▶ receiver      time there = whole round trip - time of one byte
    #     sender   ◀── one byte ──── receiver                   back, which is half of a 1-byte trip
    back_s = times.pop(1) / 2
    # The answer is one byte, so the forward direction takes most of the time. On a busy host the
    # one-byte round trip may be slower by chance.
    one_way = [
        max(there_and_back / 2, there_and_back - back_s) for there_and_back in times.values()
    ]
    latency_s, bandwidth = fit(list(times), one_way)
    return Rate(latency_s=latency_s, bandwidth_bytes_per_s=bandwidth), changed


def _round_trip(sent: torch.Tensor, receiver: int, group: dist.ProcessGroup) -> tuple[float, int]:
    """Return the seconds until the other end answered, and its answer."""
    answer = torch.zeros(1, dtype=torch.int64)
    began = time.perf_counter()
    dist.send(sent, receiver, group=group)
    dist.recv(answer, receiver, group=group)
    return time.perf_counter() - began, int(answer)


def _receive(sender: int, group: dist.ProcessGroup) -> None:
    """Answer ``_send`` at once, and finally with the number of corrupted bytes."""
    answer = torch.zeros(1, dtype=torch.int64)
    for size in (1, *HOST_SIZES):
        received = torch.zeros(size, dtype=torch.int8)
        for _ in range(_REPEATS):
            dist.recv(received, sender, group=group)
            dist.send(answer, sender, group=group)
    dist.recv(received, sender, group=group)
    answer.fill_(_changed(received))
    dist.send(answer, sender, group=group)


def _changed(received: torch.Tensor) -> int:
    return int((received != pattern(received.numel())).sum())
