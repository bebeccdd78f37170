"""From a model to a placement in one call: profile here, solve on a server or here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, get_args

from placer.errors import (
    InfeasibleError,
    InputError,
    MissingExtraError,
    ServerError,
    SolveLimitError,
    UnreachableError,
    kind_of,
)
from placer.request_spec import blank_profiles
from placer.schema import (
    BatchOptions,
    Constraints,
    Objective,
    Placement,
    PlacementRequest,
    Profile,
    ScheduleChoice,
    Steps,
    Transfers,
)
from placer.schema.graph import Graph, Optimizer, ProfileRequest

from .client import Client
from .connection import url_of

if TYPE_CHECKING:
    from torch import nn

    from placer.capture.granularity import Granularity
    from placer.devices import DeviceLike

__all__ = ["suggest"]


def suggest(
    model: nn.Module | None = None,
    example_inputs: Any = None,
    *,
    server: str | None = None,
    devices: int | Sequence[DeviceLike] | None = None,
    training: bool = True,
    optimizer: Any = "adam",
    granularity: Granularity = "auto",
    objective: Objective = "throughput",
    constraints: Constraints | None = None,
    chunks: int = 1,
    batch_size: int | None = None,
    batch_sizes: Sequence[int] | None = None,
    schedule: ScheduleChoice | None = None,
    steps: Steps | None = None,
    transfers: Transfers = "added",
    time_limit_s: float = 30.0,
    work_limit: float | None = None,
    break_ties: bool = False,
    bottleneck_ms: float | None = None,
    explain: bool = False,
    split_tied: bool = False,
    memory_bytes: int | Mapping[DeviceLike, int] | None = None,
    profile: Profile | Sequence[Profile] | None = None,
    cache: bool | str | os.PathLike[str] = True,
    progress: bool = True,
    profile_on_server: bool | None = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    target: Any = None,
    batch_options: BatchOptions | None = None,
) -> Placement:
    """Find where each layer of a model should run.

    Args:
        model: any module, on any device, ``meta`` included; None where a profile is given.
        example_inputs: of one micro-batch: one argument, a tuple of positional or a dict of keyword
            arguments. What the model carries if None: Lightning's ``example_input_array``,
            transformers' ``dummy_inputs``.
        server: the URL of a service that solves; ``PLACER_URL`` from the environment if None;
            without both, it is solved in this process.
        devices: to place on: a count, a list of devices, or None for all that are available.
        training: whether a training step or inference is placed; a given profile of inference is
            placed as such.
        optimizer: whose state takes memory, in training: a name from ``torch.optim``, a class, an
            optimizer, a list of optimizers, or None.
        granularity: how the model is cut into layers: ``auto``, ``blocks``, ``submodule``,
            ``fine``, a depth, or a function. With ``blocks`` every repeated block is one layer, as
            ``Placement.device_map`` needs it.
        objective: what is made small: ``throughput``, the bottleneck; ``step``, the time of a whole
            batch; ``latency``, one sample's time; ``memory``, the largest use; or ``devices``, how
            many keep within ``bottleneck_ms``.
        constraints: what the placement must respect beside memory.
        chunks: micro-batches in a batch; chosen under objective ``step``.
        batch_size: objective ``step``: samples in a whole batch; ``chunks`` micro-batches if None.
        batch_sizes: objective ``step``: micro-batches of so many samples are measured, and one of
            them chosen; those of the example alone if None.
        schedule: how they are ordered: ``fill-drain``, ``1f1b``, ``zero-bubble`` or
            ``interleaved``; if None, or ``auto``, it is chosen under objective ``step``; else None
            is ``1f1b``.
        steps: objective ``step``: whether the step that is made short is ``alone``, from idle
            devices to idle devices, or ``in-a-row``, one of many that overlap; if None, as a
            training loop has them: in a row, in inference alone.
        transfers: whether transfers add to a device's time, or overlap with its compute.
        time_limit_s: after so many seconds the best answer so far is returned.
        work_limit: after so much work in the solver's own measure, too: the same answer on every
            machine.
        break_ties: whether, of placements as good, the one is looked for with less transfer, then
            better balance.
        bottleneck_ms: objective ``devices``: no device may be busy longer for one micro-batch.
        explain: whether to find out, too, what limits the placement and what would help most.
        split_tied: whether layers that share parameters may be on several devices; each device but
            that of the first layer then holds a copy, see ``Profile.untied``. They share a device
            otherwise.
        memory_bytes: what a placement may use, in bytes, of each device or by device; None for all
            of its memory.
        profile: an earlier profile of the model, to be placed without measuring again; under
            objective ``step`` also several of different micro-batch sizes.
        cache: whether layers that were measured before are taken from the cache, see
            ``placer.profile``; or its folder.
        progress: whether to show bars on a terminal.
        profile_on_server: whether the server's machine measures the model, on all of its devices,
            or on as many as ``devices`` says; it is sent the operations, shapes and dtypes of the
            model, and no weights. If None: where there is no GPU here, one there, and neither
            ``devices`` nor ``memory_bytes`` is given.
        loss_fn: ``loss_fn(output, target)``, in training: its time and memory count with those of
            the layer that makes the model's result. It is measured here, and belongs to a model
            that is.
        target: of one micro-batch, for ``loss_fn``.
        batch_options: where the samples of a batch lie, and how its loss is reduced; the placement
            carries them to ``update_flow``. The first dimension is the batch if None; those of a
            given profile stay.

    Returns:
        The placement, for ``DataFlow(model).update_flow(placement)``.

    Raises:
        InputError: an argument cannot be used; the message says which, before anything is measured
            where that is known.
        MissingExtraError: torch is not installed.
        InfeasibleError: no placement meets the requirements.
        SolveLimitError: none was found in time.
        ServerError: the server cannot be reached or cannot answer.
    """
    if not isinstance(batch_options, BatchOptions | None):
        raise InputError(
            f"batch_options is {kind_of(batch_options)}; give placer.BatchOptions(...), or leave it out"
        )
    if profile is not None and batch_options is not None:
        raise InputError("a profile is given, which has batch_options of its own: leave them out")
    if not isinstance(split_tied, bool):
        raise InputError(f"split_tied is {split_tied!r}; give True or False")
    server = server or os.environ.get("PLACER_URL")
    if server:
        # else it is told only after minutes of measuring that this is none
        url_of(server)
    there = profile is None and _measures_there(profile_on_server, server, devices, memory_bytes)
    if (profile is not None or there) and not (loss_fn is None and target is None):
        why = (
            "a server runs no functions"
            if there
            else "a profile is given, which was made with a loss or without"
        )
        raise InputError(f"{why}: leave loss_fn and target out, or have the model measured here")

    def request_of(profiles: list[Profile], rules: Constraints) -> PlacementRequest:
        trains = training and profiles[-1].training
        profiles = [one.untied() for one in profiles] if split_tied else profiles
        return PlacementRequest(
            profile=profiles[-1],
            profiles=profiles[:-1],
            batch_size=batch_size,
            objective=objective,
            constraints=rules,
            training=trains,
            chunks=chunks,
            schedule=schedule or ("auto" if objective == "step" else "1f1b"),
            steps=steps or ("in-a-row" if objective == "step" and trains else "alone"),
            transfers=transfers,
            time_limit_s=time_limit_s,
            work_limit=work_limit,
            break_ties=break_ties,
            bottleneck_ms=bottleneck_ms,
            explain=explain,
        )

    rules = _rules(constraints)
    if profile is None:
        module = _checked(model)
        example_inputs = _carried_inputs(module) if example_inputs is None else example_inputs
        sizes = _sizes(module, example_inputs, batch_sizes, batch_options or BatchOptions())
        expected = _expected(sizes, training, None if there else _names(devices), rules)
        # what is wrong of it is told before minutes of measuring
        request_of(expected, rules)
    if there and server:
        with _waiting("measuring on the server", progress):
            profiles = _measure_there(
                server,
                module,
                example_inputs,
                devices,
                training=training,
                optimizer=optimizer,
                granularity=granularity,
                batch_sizes=batch_sizes,
                options=batch_options or BatchOptions(),
            )
    elif profile is None:
        profiles = _measure(
            module,
            example_inputs,
            devices,
            training=training,
            optimizer=optimizer,
            granularity=granularity,
            progress=progress,
            memory_bytes=memory_bytes,
            cache=cache,
            batch_sizes=batch_sizes,
            loss_fn=loss_fn,
            target=target,
            batch_options=batch_options,
        )
    elif devices is not None or memory_bytes is not None:
        raise InputError(
            "a profile is given, so its cluster counts: leave devices and memory_bytes out"
        )
    elif granularity != "auto" or optimizer != "adam":
        raise InputError(
            "a profile is given, as it was measured: leave granularity and optimizer out"
        )
    else:
        profiles = _given(profile)
    if not profiles or (batch_sizes is not None and profile is not None):
        raise InputError(
            "batch_sizes are measured here, and a profile is given; give one or several profiles, or sizes"
        )
    request = request_of(profiles, rules)
    with _waiting("solving", progress):
        placement = _solve(request, server)
    return _found(placement, time_limit_s)


def _rules(constraints: Any) -> Constraints:
    """The constraints, which may be given as what their JSON holds."""
    if isinstance(constraints, Constraints):
        return constraints
    return Constraints.model_validate({} if constraints is None else constraints)


def _sizes(
    model: nn.Module, example_inputs: Any, batch_sizes: Any, options: BatchOptions
) -> list[int]:
    from placer.capture.batch_dims.batch_layout import Parameters
    from placer.profiler import profile_inputs

    return profile_inputs.sizes(example_inputs, batch_sizes, options, Parameters.of(model))


def _expected(
    sizes: list[int], training: bool, devices: list[str] | None, rules: Constraints
) -> list[Profile]:
    """Blank profiles as they will be measured: on devices that the constraints name, and enough of
    them, if None.
    """
    layers = [*rules.pinned, *rules.forbidden, *chain(*rules.colocated)]
    if devices is None:
        asked = () if isinstance(rules.recompute, str) else rules.recompute
        devices = [*rules.pinned.values(), *chain(*rules.forbidden.values()), *asked]
        devices += [f"device {number}" for number in range(rules.min_devices or 1)]
    return blank_profiles(training, layers, devices, sizes)


def _names(devices: Any) -> list[str]:
    from placer.devices import resolve

    return [str(device) for device in resolve(devices)]


def _given(profile: Profile | Sequence[Profile]) -> list[Profile]:
    """The profiles that were made before, the largest micro-batch last."""
    found = [profile] if isinstance(profile, Profile) else profile
    if not isinstance(found, Sequence) or not all(isinstance(one, Profile) for one in found):
        raise InputError(
            f"profile is {kind_of(profile)}; give a Profile, which Profile.model_validate_json(text) makes of "
            "JSON, or a list of them"
        )
    return sorted(found, key=lambda one: one.batch_size)


def _measure(model: nn.Module, example_inputs: Any, devices: Any, **options: Any) -> list[Profile]:
    """The model's profile, or those of several micro-batch sizes, the largest last."""
    from placer.profiler.profile import profile

    measured: Profile | list[Profile] = profile(model, example_inputs, devices, **options)
    return [measured] if isinstance(measured, Profile) else measured


def _checked(model: Any) -> nn.Module:
    """The model, if it is one and torch is here."""
    try:
        from placer.capture.user_objects import refuse_no_module
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "profiling needs torch: pip install 'torch-placer[torch]'"
        ) from error
    refuse_no_module(model, "an nn.Module, or a profile made from one")
    found: nn.Module = model
    return found


def _measures_there(
    wanted: bool | None, server: str | None, devices: Any, memory_bytes: Any
) -> bool:
    """Whether the server's machine measures the model."""
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
    try:
        import torch
    except ModuleNotFoundError:
        return False  # what is said then names the extra
    if torch.cuda.is_available():
        return False
    try:
        with Client(server) as client:
            return any(not device.name.startswith("cpu") for device in client.cluster().devices)
    except UnreachableError:
        raise
    except ServerError:  # it cannot measure, or is too old to say
        return False


def _measure_there(
    server: str,
    model: nn.Module,
    example_inputs: Any,
    devices: Any,
    *,
    optimizer: Any,
    options: BatchOptions,
    **how: Any,
) -> list[Profile]:
    """The model's profile on the server's devices, or those of several micro-batch sizes, the
    largest last.
    """
    from placer.profiler.remote.sending import describe

    graphs = describe(model, example_inputs, options=options, **how)
    requests = [_profile_request(graph, devices, optimizer) for graph in graphs]
    with Client(server) as client:
        measured = [client.profile(request) for request in requests]
    return [one.model_copy(update={"batch_options": options}) for one in measured]


def _profile_request(graph: Graph, devices: Any, optimizer: Any) -> ProfileRequest:
    name = optimizer.lower() if isinstance(optimizer, str) else optimizer
    try:
        return ProfileRequest(graph=graph, devices=devices, optimizer=name)
    except InputError as error:
        known = ", ".join(get_args(Optimizer))
        raise InputError(
            f"a server measures the optimizers {known}, or None, on at least one device; not {optimizer!r} on {devices}"
        ) from error


def _carried_inputs(model: nn.Module) -> Any:
    """The example inputs that a model brings along.

    Raises:
        InputError: it brings none.
    """
    for name in ("example_input_array", "dummy_inputs"):
        try:
            carried = getattr(model, name, None)
        except Exception:
            # transformers computes dummy_inputs, which fails for some models
            continue
        if carried is not None and not callable(carried):
            return carried
    raise InputError(
        f"{type(model).__name__} carries no example inputs (example_input_array or dummy_inputs):"
        " pass one micro-batch, suggest(model, x), suggest(model, (x, y)) or suggest(model, {'input_ids': x})"
    )


def _solve(request: PlacementRequest, server: str | None) -> Placement:
    if server:
        with Client(server) as client:
            return client.place(request)
    from placer.solver.solve import solve

    return solve(request)


def _found(placement: Placement, time_limit_s: float) -> Placement:
    if placement.status == "infeasible":
        reason = (
            placement.infeasible.text
            if placement.infeasible
            else "no placement meets the requirements"
        )
        raise InfeasibleError(reason)
    if not placement.layer_devices:
        raise SolveLimitError(
            f"no placement was found within {time_limit_s:g} s; allow more with time_limit_s"
        )
    return placement


@contextmanager
def _waiting(text: str, shown: bool) -> Iterator[None]:
    """A spinner on stderr, where that is a terminal."""
    if not (shown and sys.stderr.isatty()):
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield
