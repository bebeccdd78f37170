"""``suggest_together``: from several models to their placements under one memory budget.

models ──▶ a profile of each ──▶ joint request ──▶ solve, on the server or here ──▶ a placement each
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from placer.errors import InputError, kind_of
from placer.schema import Profile, ProfileOptions, SuggestOptions
from placer.schema.joint import JointOptions, JointPlacement, JointRequest, ProfiledModel
from placer.schema.options import SolveOptions, combined
from placer.schema.profile import MOST_REPEATS
from placer.utils.option_checks import require_flags

from .client import Client
from .connection import url_of
from .suggest import measured_profiles, or_error, waiting

if TYPE_CHECKING:
    from torch import nn

    from placer.devices import DeviceLike


_SOLVING = frozenset(JointOptions.model_fields)
"""The options of ``suggest`` that say how several models are placed."""

_MEASURING = frozenset({"granularity", "repeats", "cache", "split_tied"})
"""The options of ``suggest`` that say how each of them is measured."""


@dataclass(frozen=True)
class ModelUse:
    """A model that takes part in a request, for ``suggest_together`` and ``DataFlows``.

    Attributes:
        model: any module, on any device, ``meta`` included; or its profile, to place it without
            measuring again.
        example_inputs: of one run: one argument, a tuple of positional or a dict of keyword
            arguments. None: the inputs that the model carries.
        runs: how often the model runs in one request: a UNet once for each step of denoising.
    """

    model: nn.Module | Profile
    example_inputs: Any = None
    runs: int = 1

    def __post_init__(self) -> None:
        """Refuse runs that are not a whole number from 1."""
        if isinstance(self.runs, bool) or not isinstance(self.runs, int):
            raise InputError(f"runs is {self.runs!r}; give a whole number from 1")
        if not 1 <= self.runs <= MOST_REPEATS:
            raise InputError(f"runs is {self.runs}; give a number from 1 to {MOST_REPEATS:,}")


def suggest_together(
    models: Mapping[str, ModelUse],
    *,
    devices: int | Sequence[DeviceLike] | None = None,
    memory_bytes: int | str | Mapping[DeviceLike, int | str] | None = None,
    server: str | None = None,
    progress: bool = True,
    options: SuggestOptions | SolveOptions | ProfileOptions | None = None,
    **fields: Any,
) -> JointPlacement:
    """Find where each layer of several models should run that are used one after another.

        models = {
            "text_encoder": ModelUse(text_encoder, ids),
            "unet": ModelUse(unet, (latents, step, states), runs=50),
            "decoder": ModelUse(decoder, latents),
        }
        found = suggest_together(models, devices=2)
        flows = placer.DataFlows(models, found)

    All weights stay on their devices; only one model at a time has activations. The placements make
    the time of a request short: the sum of each model's runs times its latency. See
    ``placer.schema.joint`` for the formulas.

    Args:
        models: what takes part in a request, by name.
        devices: the devices to place on: a number, a list, or None for all available devices.
        memory_bytes: the memory that all models may use together, in bytes or as ``"24GiB"``, of
            each device or by device; by default all of it.
        server: the URL of a service that solves; by default ``PLACER_URL`` from the environment.
            Without either, this process solves. Models are measured here.
        progress: show progress on a terminal.
        options: how to measure and to solve. ``constraints`` name layer ``conv_in`` of model
            ``unet`` as ``unet/conv_in``.
        fields: single fields of ``options``, for short: ``granularity``, ``repeats``, ``cache``,
            ``split_tied``, ``constraints``, ``time_limit_s``, ``work_limit``, ``seed``,
            ``workers``, ``break_ties`` and ``explain``.

    Returns:
        A placement of each model, with the time of a request and the memory of all models.

    Raises:
        InputError: an argument cannot be used. The message names it.
        MissingExtraError: torch is not installed.
        InfeasibleError: no placements meet the requirements.
        SolveLimitError: no placements were found in time.
        ServerError: the server cannot be reached or cannot answer.
    """
    require_flags(progress=progress)
    uses = _checked(models)
    asked = combined(SuggestOptions, options, fields, suggest_together, _SOLVING | _MEASURING)
    _refuse_other_options(asked)
    server = server or os.environ.get("PLACER_URL")
    if server:
        url_of(server)  # Refuse a wrong URL now, not after minutes of measuring.
    is_measured = any(not isinstance(use.model, Profile) for use in uses.values())
    if not is_measured and (devices is not None or memory_bytes is not None):
        raise InputError(
            "only profiles are given, so their clusters count: leave devices and memory_bytes out"
        )
    inference = asked.model_copy(update={"training": False})
    profiled = {
        name: ProfiledModel(
            profile=_profile(use, inference, devices, memory_bytes, progress), runs=use.runs
        )
        for name, use in uses.items()
    }
    solving = {name: getattr(asked, name) for name in asked.model_fields_set & _SOLVING}
    request = JointRequest(models=profiled, **solving)
    with waiting("solving", progress):
        placements = answer_together(request, server)
    or_error(placements.joint, request.time_limit_s)
    return placements


def _checked(models: Any) -> dict[str, ModelUse]:
    """Return the models by name.

    Raises:
        InputError: they are not a mapping of ``ModelUse``, or the mapping is empty.
    """
    if not isinstance(models, Mapping):
        raise InputError(
            f"models is {kind_of(models)}; give a dict from names to placer.ModelUse(model, inputs,"
            " runs=...)"
        )
    if not models:
        raise InputError("models is empty; give a dict from names to placer.ModelUse(...)")
    for name, use in models.items():
        if not isinstance(use, ModelUse):
            raise InputError(
                f"models[{name!r}] is {kind_of(use)}; give placer.ModelUse(model, inputs, runs=...)"
            )
    return dict(models)


def _refuse_other_options(asked: SuggestOptions) -> None:
    """Refuse options that have no effect on several models."""
    stated = {"objective": ("latency",), "training": (False, None)}
    for name in sorted(asked.model_fields_set - _SOLVING - _MEASURING):
        value = getattr(asked, name)
        if value not in stated.get(name, (SuggestOptions.model_fields[name].default,)):
            raise InputError(
                f"{name} is {value!r}, but models that are used one after another are placed for "
                f"the latency of inference; leave {name} out, or place each model by itself with "
                "placer.suggest"
            )


def _profile(
    use: ModelUse, asked: SuggestOptions, devices: Any, memory_bytes: Any, progress: bool
) -> Profile:
    """Return the profile of a model; measure it unless it is given."""
    profile = (
        use.model
        if isinstance(use.model, Profile)
        else measured_profiles(
            use.model, use.example_inputs, asked, devices, memory_bytes, progress
        )[-1]
    )
    return profile.untied() if asked.split_tied else profile


def answer_together(request: JointRequest, server: str | None) -> JointPlacement:
    """Solve on the server, or in this process if ``server`` is None."""
    if server:
        with Client(server) as client:
            return client.place_together(request)
    from placer.solver.together import solve_together

    return solve_together(request)
