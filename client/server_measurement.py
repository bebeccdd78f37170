"""Measuring a model on the devices of a service: when, and with which graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from placer.errors import InputError, ServerError, UnreachableError
from placer.schema import BatchOptions, Profile, SuggestOptions
from placer.schema.graph import Graph, Optimizer, ProfileRequest

from .client import Client

if TYPE_CHECKING:
    from torch import nn


def measures_there(
    wanted: bool | None, server: str | None, devices: Any, memory_bytes: Any
) -> bool:
    """Return whether the server's machine measures the model.

    Args:
        wanted: what the caller asked for; None to decide here.
        server: the URL of the service, or None.
        devices: as for ``suggest``.
        memory_bytes: as for ``suggest``.

    Raises:
        InputError: the server cannot do so with these arguments.
    """
    if wanted is None:
        return (
            server is not None
            and devices is None
            and memory_bytes is None
            and _only_there_are_gpus(server)
        )
    if wanted and not server:
        raise InputError(
            "profile_on_server is True, but no server is given: pass server=, or set PLACER_URL"
        )
    if wanted and (memory_bytes is not None or not (devices is None or isinstance(devices, int))):
        raise InputError(
            "the server measures its own devices: give their number alone, and no memory_bytes"
        )
    return wanted


def _only_there_are_gpus(server: str) -> bool:
    """Return whether the server has a GPU and this machine has none."""
    try:
        import torch
    except ModuleNotFoundError:
        return False  # Measuring here then raises an error that names the extra.
    if torch.cuda.is_available():
        return False
    try:
        with Client(server) as client:
            return any(not device.name.startswith("cpu") for device in client.cluster().devices)
    except UnreachableError:
        raise
    except ServerError:  # The server cannot measure, or is too old to answer.
        return False


def measure_there(
    server: str, model: nn.Module, example_inputs: Any, devices: Any, asked: SuggestOptions
) -> list[Profile]:
    """Return profiles on the server's devices, one for each micro-batch size, the largest last."""
    from placer.profiler.remote.sending import describe

    options = asked.batch_options or BatchOptions()
    graphs = describe(
        model,
        example_inputs,
        training=asked.training is not False,
        granularity=asked.granularity,
        batch_sizes=asked.batch_sizes,
        options=options,
    )
    requests = [_profile_request(graph, devices, asked) for graph in graphs]
    with Client(server) as client:
        measured = [client.profile(request) for request in requests]
    # The server measures graphs, and does not know where the samples of inputs are.
    return [one.model_copy(update={"batch_options": options}) for one in measured]


def _profile_request(graph: Graph, devices: Any, asked: SuggestOptions) -> ProfileRequest:
    optimizer = asked.optimizer
    name = optimizer.lower() if isinstance(optimizer, str) else optimizer
    known = get_args(Optimizer)
    if name is not None and name not in known:
        raise InputError(
            f"a server measures the optimizers {', '.join(known)}, or None; not {optimizer!r}"
        )
    return ProfileRequest(graph=graph, devices=devices, optimizer=name, repeats=asked.repeats)
