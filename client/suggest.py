"""``suggest``: from a model to a placement in one call.

model ──▶ profile, here or on the server ──▶ request ──▶ solve, on the server or here
profiles ────────────────────────────────────▲
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

from placer.errors import InfeasibleError, InputError, MissingExtraError, SolveLimitError, kind_of
from placer.exports.formats import format_named
from placer.schema import (
    BatchOptions,
    Cluster,
    Device,
    Layer,
    Link,
    Objective,
    Placement,
    PlacementRequest,
    Profile,
    ProfileOptions,
    SolveOptions,
    SuggestOptions,
)
from placer.schema.options import combined
from placer.utils.option_checks import require_flags

from .client import Client
from .connection import url_of
from .server_measurement import measure_there, measures_there

if TYPE_CHECKING:
    from torch import nn

    from placer.devices import DeviceLike


def suggest(
    model: nn.Module | Profile | Sequence[Profile] | None = None,
    example_inputs: Any = None,
    *,
    devices: int | Sequence[DeviceLike] | None = None,
    training: bool | None = None,
    objective: Objective | None = None,
    batch_size: int | None = None,
    memory_bytes: int | str | Mapping[DeviceLike, int | str] | None = None,
    server: str | None = None,
    progress: bool = True,
    options: SuggestOptions | SolveOptions | ProfileOptions | None = None,
    **fields: Any,
) -> Placement:
    """Find where each layer of a model should run.

        suggest(model, inputs, devices=2)
        suggest(model, inputs, granularity="blocks", time_limit_s=5)
        suggest(profile, options=placer.SolveOptions(objective="memory"))

    Args:
        model: any module, on any device, ``meta`` included; or its profile, to place it without
            measuring again. Under objective ``step`` also several profiles of different
            micro-batch sizes, and under ``generation`` the profiles of the prompt's pass and of a
            pass of one token.
        example_inputs: one micro-batch: one argument, a tuple of positional or a dict of keyword
            arguments. None: the inputs that the model carries, as Lightning's
            ``example_input_array`` or transformers' ``dummy_inputs``. Under objective
            ``generation``: token ids of prompts, by default one prompt of zeros.
        devices: the devices to place on: a number, a list, or None for all available devices.
        training: whether to place a training step (by default) or inference. A profile of
            inference is placed as inference by default.
        objective: the quantity to minimise: ``throughput`` (the bottleneck, by default),
            ``step`` (the time of a whole batch), ``latency`` (the time of one sample),
            ``generation`` (the time of a text of ``generation``), ``memory`` (the largest use of a
            device's memory), or ``devices`` (the number of devices that keep within
            ``bottleneck_ms``).
        batch_size: samples in a whole batch, for objective ``step``; by default ``chunks``
            micro-batches.
        memory_bytes: the memory that a placement may use, in bytes or as ``"24GiB"``, of each
            device or by device; by default all of it.
        server: the URL of a service that solves; by default ``PLACER_URL`` from the environment.
            Without either, this process solves.
        progress: show progress on a terminal.
        options: what to solve and how to measure, in addition to the arguments above.
        fields: single fields of ``options``, for short.

    Returns:
        The placement, for ``DataFlow(model).update_flow(placement)``.

    Raises:
        InputError: an argument cannot be used. The message names it; where possible, before
            anything is measured.
        BatchError: under objective ``step``, parts of the example inputs give other results than
            the whole, so the samples lie elsewhere than ``batch_options`` says.
        MissingExtraError: torch is not installed.
        InfeasibleError: no placement meets the requirements.
        SolveLimitError: no placement was found in time.
        ServerError: the server cannot be reached or cannot answer.
    """
    require_flags(progress=progress)
    if training is not None:
        require_flags(training=training)
    direct = {"training": training, "objective": objective, "batch_size": batch_size}
    fields |= {name: given for name, given in direct.items() if given is not None}
    for name in ("profile", "profiles"):
        if name in fields:
            raise InputError(
                f"suggest has no argument {name!r}; pass a profile, or a list of profiles, as the"
                " first argument: suggest(profile)"
            )
    asked = combined(SuggestOptions, options, fields, suggest)
    server = server or os.environ.get("PLACER_URL")
    request = question(
        model,
        example_inputs,
        asked,
        devices=devices,
        memory_bytes=memory_bytes,
        server=server,
        progress=progress,
    )
    with waiting("solving", progress):
        placement = answer(request, server)
    request.warn_of_hooks(placement.layer_devices)
    return _with_host_time(or_error(placement, request.time_limit_s), model, example_inputs, asked)


def _with_host_time(
    placement: Placement, model: Any, example_inputs: Any, asked: SuggestOptions
) -> Placement:
    """Return the placement of a generation with the time of the host, if there is a model."""
    if placement.generation is None or asked.generation is None or _given_profiles(model):
        return placement
    import torch

    from placer.profiler.generation import host_ms, prompt_inputs

    prompt = prompt_inputs(model, example_inputs, asked.generation)
    first = torch.device(next(iter(placement.layer_devices.values())))
    place = first if first.type == "cuda" else prompt["input_ids"].device
    found = placement.generation.model_copy(update={"host_ms": host_ms(model, prompt, place)})
    return placement.model_copy(update={"generation": found})


def question(
    model: Any,
    example_inputs: Any,
    asked: SuggestOptions,
    *,
    devices: Any = None,
    memory_bytes: Any = None,
    server: str | None = None,
    progress: bool = True,
) -> PlacementRequest:
    """Return the request that answers ``suggest``; measure the model unless it is a profile.

    ``asked`` includes the direct parameters of ``suggest``. The other arguments and the errors are
    as for ``suggest``.
    """
    if server:
        url_of(server)  # Refuse a wrong URL now, not after minutes of measuring.
    profiles = _given_profiles(model)
    if profiles:
        return _with_profiles(profiles, asked, devices, memory_bytes)
    there = measures_there(asked.profile_on_server, server, devices, memory_bytes)
    if there:
        _refuse_on_server(asked)
    module = _checked(model)
    asked = _with_disk(asked)
    if asked.objective == "generation":
        return _generation(module, example_inputs, asked, devices, memory_bytes, progress)
    if "replicas" not in asked.model_fields_set and not _may_be_replicated(module):
        asked = asked.model_copy(update={"replicas": "never"})
    inputs = _inputs(module, example_inputs)
    sizes = _sizes(module, inputs, asked)
    # Find faults of the request before minutes of measuring.
    expected = _request(asked, _expected(sizes, asked, None if there else _names(devices)))
    expected.warn_of_one_size(asked)
    if asked.objective == "step":
        _verify(module, inputs, asked)
    if there and server:
        with waiting("measuring on the server", progress):
            measured = measure_there(server, module, inputs, devices, asked)
    else:
        measured = _measure(module, inputs, asked, devices, memory_bytes, progress)
    return _request(_keeping_whole(asked, module, measured), measured)


def _with_disk(asked: SuggestOptions) -> SuggestOptions:
    """Return the options with the folder whose disk is measured, if parameters may rest there."""
    if asked.disk_bytes is None or asked.disk_folder is not None:
        return asked
    from placer.devices import disk_folder

    return asked.model_copy(update={"disk_folder": disk_folder()})


def _with_profiles(
    profiles: list[Profile], asked: SuggestOptions, devices: Any, memory_bytes: Any
) -> PlacementRequest:
    """Return the request of a user who measured the model before."""
    if devices is not None or memory_bytes is not None:
        raise InputError(
            "a profile is given, so its cluster counts: leave devices and memory_bytes out, or"
            " give a profile with another cluster"
        )
    _refuse_measuring(asked)
    if asked.objective == "generation" and len(profiles) == 2:
        return _request(asked, profiles[:1], profiles[1])
    request = _request(asked, profiles)
    request.warn_of_one_size(asked)
    return request


def _refuse_on_server(asked: SuggestOptions) -> None:
    """Raise an InputError for options with which a server cannot measure a model."""
    if asked.loss_fn is not None or asked.target is not None:
        raise InputError(
            "a server runs no functions: leave loss_fn and target out, or have the model measured"
            " here with profile_on_server=False"
        )
    if asked.disk_bytes is not None or asked.disk_folder is not None:
        raise InputError(
            "a server does not measure its disk; leave disk_bytes and disk_folder out, or have the"
            " model measured here with profile_on_server=False"
        )
    if asked.objective == "generation":
        raise InputError(
            "a server measures one pass of a model, and objective 'generation' needs two;"
            " measure the model here with profile_on_server=False"
        )


def answer(request: PlacementRequest, server: str | None) -> Placement:
    """Solve a request on the server, or in this process if ``server`` is None."""
    if server:
        with Client(server) as client:
            return client.place(request)
    from placer.solver.solve import solve

    return solve(request)


def or_error(placement: Placement, time_limit_s: float) -> Placement:
    """Return a placement, or raise the error that explains why it has no layers.

    Raises:
        InfeasibleError: no placement meets the requirements.
        SolveLimitError: no placement was found in time.
    """
    if placement.status == "infeasible":
        reason = (
            placement.infeasible.text
            if placement.infeasible
            else "no placement meets the requirements"
        )
        if placement.sharded is not None:
            reason += f"; FSDP2 is predicted to fit: {placement.sharded.text}"
        raise InfeasibleError(reason)
    if not placement.layer_devices:
        raise SolveLimitError(
            f"no placement was found within {time_limit_s:g} s; allow more with time_limit_s"
        )
    return placement


def _request(
    asked: SuggestOptions, profiles: list[Profile], token_profile: Profile | None = None
) -> PlacementRequest:
    profiles = [one.untied() for one in profiles] if asked.split_tied else profiles
    if token_profile is not None and asked.split_tied:
        token_profile = token_profile.untied()
    training = profiles[-1].training if asked.training is None else asked.training
    update: dict[str, Any] = {"training": training}
    if training and asked.objective == "step" and "replicas" not in asked.model_fields_set:
        update["replicas"] = "auto"
    return PlacementRequest.from_options(
        asked.model_copy(update=update), profiles, token_profile=token_profile
    )


def _may_be_replicated(module: nn.Module) -> bool:
    """Return whether replicas can train a model; see ``refuse_unreplicable`` of the executor."""
    from torch import nn

    return not any(
        isinstance(child, nn.SyncBatchNorm) or getattr(child, "max_norm", None) is not None
        for child in module.modules()
    )


def _generation(
    model: nn.Module,
    example_inputs: Any,
    asked: SuggestOptions,
    devices: Any,
    memory_bytes: Any,
    progress: bool,
) -> PlacementRequest:
    """Return the request for generations; measure the prompt's pass and a pass of one token."""
    from placer.estimator.expert_choices import experts_per_token
    from placer.estimator.kv_cache import keys_and_values
    from placer.executor.generation.cache_view import capacity_at_end
    from placer.profiler.generation import REMEDY, profile_generation, prompt_inputs

    if asked.batch_sizes is not None:
        raise InputError(
            f"batch_sizes is {asked.batch_sizes!r}, which objective 'generation' does not choose"
            " from; leave batch_sizes out"
        )
    # Find faults of the request before minutes of measuring.
    asked = asked.model_copy(update={"training": bool(asked.training)})
    names = _names(devices)
    _request(asked, _expected([1], asked, names), *_expected([1], asked, names))
    text = asked.generation
    assert text is not None  # as validated
    prompt = prompt_inputs(model, example_inputs, text)
    if "granularity" not in asked.model_fields_set:
        # the cache of a block belongs to the block as a whole
        asked = asked.model_copy(update={"granularity": "blocks"})
    first, token = profile_generation(
        model,
        prompt,
        text,
        keys_and_values(model, len(prompt["input_ids"]), REMEDY),
        capacity_at_end(text.prompt_tokens, text.new_tokens),
        devices,
        memory_bytes=memory_bytes,
        progress=progress,
        options=_measuring(asked),
        experts=experts_per_token(model),
    )
    return _request(_keeping_whole(asked, model, [first]), [first], token)


def _keeping_whole(
    asked: SuggestOptions, module: nn.Module, profiles: list[Profile]
) -> SuggestOptions:
    """Return the options with the modules that the format keeps on one device for this model."""
    if asked.for_format is None:
        return asked
    layers = [layer.name for layer in profiles[-1].layers]
    groups = format_named(asked.for_format).kept_whole(layers, module)
    rules = asked.constraints
    kept = rules.model_copy(update={"colocated": (*rules.colocated, *groups)})
    return asked.model_copy(update={"constraints": kept})


def _given_profiles(model: Any) -> list[Profile]:
    """Return the profiles that were given instead of a model, the largest micro-batch last.

    Raises:
        InputError: what was given looks like a profile, but is not a ``Profile``.
    """
    given = [model] if isinstance(model, Profile) else model
    if not isinstance(given, list | tuple | dict | str | os.PathLike):
        return []
    if not isinstance(given, list | tuple) or not all(isinstance(one, Profile) for one in given):
        raise InputError(
            f"model is {kind_of(model)}; give an nn.Module, or a Profile, which"
            " Profile.model_validate_json(text) makes of JSON, or a list of them; several models"
            " that are used one after another go to placer.suggest_together"
        )
    if not given:
        raise InputError("model is an empty list; give an nn.Module, or one profile or several")
    return sorted(given, key=lambda one: one.batch_size)


def _refuse_measuring(asked: SuggestOptions) -> None:
    """Refuse options that say how to measure where a profile is given."""
    measuring = {*ProfileOptions.model_fields, "batch_sizes", "profile_on_server"}
    for name in sorted(asked.model_fields_set & measuring):
        if getattr(asked, name) != SuggestOptions.model_fields[name].default:
            raise InputError(
                f"{name} says how to measure, but a profile is given, which was measured before;"
                f" leave {name} out"
            )


def _sizes(model: nn.Module, example_inputs: Any, asked: SuggestOptions) -> list[int]:
    """Return the sizes of the micro-batches that will be measured."""
    from placer.capture.batch_dims.batch_layout import Parameters
    from placer.profiler import profile_inputs

    options = asked.batch_options or BatchOptions()
    return profile_inputs.sizes(
        example_inputs, asked.batch_sizes, options, Parameters.from_module(model)
    )


def _verify(model: nn.Module, example_inputs: Any, asked: SuggestOptions) -> None:
    """Verify that the samples lie where the options say, since their number counts.

    Raises:
        BatchError: parts of the example inputs give other results than the whole.
    """
    from placer.executor.checks.example_check import verify_example
    from placer.profiler.profile_inputs import mode

    with mode(model, asked.training is not False):
        verify_example(model, example_inputs, asked.batch_options or BatchOptions())


def _expected(sizes: list[int], asked: SuggestOptions, devices: list[str] | None) -> list[Profile]:
    """Return stand-ins for the profiles that will be measured, to check a request beforehand.

    The layers are unknown before measuring. The stand-ins have the layers that the constraints
    name, and as many others as there are devices, so that every device can have one. If the server
    chooses the devices, they are unknown here (None). The stand-ins then have the devices that the
    constraints name, and as many as they need.
    """
    rules = asked.constraints
    layers = [*rules.pinned, *rules.forbidden, *chain(*rules.colocated)]
    if devices is None:
        named = () if isinstance(rules.recompute, str) else rules.recompute
        devices = [*rules.pinned.values(), *chain(*rules.forbidden.values()), *named]
        devices += [f"device {number}" for number in range(rules.min_devices or 1)]
    names = list(dict.fromkeys(devices)) or ["device"]
    layers += [f"layer {number}" for number, _ in enumerate(names)]
    cluster = Cluster(
        devices=tuple(Device(name=name, type="any", memory_bytes=1) for name in names),
        links=tuple(
            Link(source=names[0], target=name, bandwidth_bytes_per_s=1.0) for name in names[1:]
        ),
    )
    rows = tuple(
        Layer(name=name, forward_ms={"any": 1.0}, backward_ms={"any": 1.0})
        for name in dict.fromkeys(layers)
    )
    training = asked.training is not False
    return [
        Profile(layers=rows, cluster=cluster, training=training, batch_size=size) for size in sizes
    ]


def _inputs(model: nn.Module, example_inputs: Any) -> Any:
    """Return the given inputs, or without them the inputs that the model carries."""
    from placer.capture.input_forms import carried_inputs

    return carried_inputs(model, "suggest") if example_inputs is None else example_inputs


def measured_profiles(
    model: Any,
    example_inputs: Any,
    asked: SuggestOptions,
    devices: Any,
    memory_bytes: Any,
    progress: bool,
) -> list[Profile]:
    """Return a model's profile on this machine; see ``suggest`` for the arguments.

    Raises:
        InputError: ``model`` is not an nn.Module, or it has no inputs, given or carried.
    """
    module = _checked(model)
    inputs = _inputs(module, example_inputs)
    return _measure(module, inputs, asked, devices, memory_bytes, progress)


def _names(devices: Any) -> list[str]:
    from placer.devices import resolve

    return [str(device) for device in resolve(devices)]


def _measure(
    model: nn.Module,
    example_inputs: Any,
    asked: SuggestOptions,
    devices: Any,
    memory_bytes: Any,
    progress: bool,
) -> list[Profile]:
    """Return the model's profile, or one for each micro-batch size, the largest last."""
    from placer.profiler.profile import profile

    measured: Profile | list[Profile] = profile(
        model,
        example_inputs,
        devices,
        training=asked.training is not False,
        memory_bytes=memory_bytes,
        batch_sizes=asked.batch_sizes,
        progress=progress,
        options=_measuring(asked),
    )
    return [measured] if isinstance(measured, Profile) else measured


def _measuring(asked: SuggestOptions) -> ProfileOptions:
    """Return the options that say how to measure."""
    return ProfileOptions(**{name: getattr(asked, name) for name in ProfileOptions.model_fields})


def _checked(model: Any) -> nn.Module:
    """Return the model.

    Raises:
        InputError: it is not an nn.Module, or it is or contains a ``DataFlow``.
        MissingExtraError: torch is not installed.
    """
    try:
        from placer.capture.argument_checks import require_module
        from placer.executor.dataflow import DataFlow
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            "profiling needs torch: pip install 'torch-placer[torch]'"
        ) from error
    require_module(model, "an nn.Module, or a profile made from one")
    found: nn.Module = model
    for name, module in found.named_modules():
        # A capture would run the flow on fake tensors, and the flow would keep them.
        if isinstance(module, DataFlow):
            what = f"module {name!r} of the model is" if name else "model is"
            raise InputError(
                f"{what} a DataFlow, which runs a model that is placed already; give that model,"
                " flow.module"
            )
    return found


@contextmanager
def waiting(text: str, shown: bool) -> Iterator[None]:
    """Show a spinner on stderr if that is a terminal."""
    if not (shown and sys.stderr.isatty()):
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield
