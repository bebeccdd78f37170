"""``placer estimate``: will a model fit? On fake tensors, without GPUs and without weights."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from placer.cli.files import write_text
from placer.cli.option_fields import Words, expanded
from placer.cli.options import Example, Printed, in_a_folder
from placer.cli.terminal import extra, spinner, users_code
from placer.errors import InputError
from placer.report.page import html_report
from placer.schema import Estimate, EstimateOptions
from placer.utils.garbage_collection import paused_collection

DOES_NOT_FIT = 3
"""Exit code of an estimate that does not fit, as of a solve without a placement."""


@expanded(EstimateOptions, leave_out=frozenset({"training"}))
def estimate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="package.module:callable, as placer.zoo.llama:llama; a checkpoint folder or"
            " configuration of transformers; or a safetensors file, for the weights alone",
        ),
    ],
    example: Example,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="SIZES",
            help="memory of the devices, as 2x24GiB or 24GiB,12GiB; without it, the numbers of"
            " common cards on which the model fits",
        ),
    ] = None,
    training: Annotated[
        bool, typer.Option("--training", help="estimate a training step instead of inference")
    ] = False,
    *,
    words: Words[EstimateOptions],
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            callback=in_a_folder,
            help="also write a report with a picture of the memory",
        ),
    ] = None,
    printed: Printed,
) -> None:
    """Estimate the memory of a model by device, without GPUs and without weights.

    The exit code is 3 if the model does not fit on the devices.
    """
    found = _estimated(model, example, devices, training, words)
    printed.emit(found)
    if html is not None:
        write_text(html, html_report(found))
    if found.fits is False:
        raise typer.Exit(DOES_NOT_FIT)


@paused_collection()
def _estimated(
    model: str, example: Example, devices: str | None, training: bool, words: Words[EstimateOptions]
) -> Estimate:
    from placer.estimator.device_sizes import cluster_of

    # --recompute-on names devices, and without sizes there is one
    cluster = cluster_of("1GiB" if devices is None else devices, 0)
    names = [device.name for device in cluster.devices]
    options = words.read(names).model_copy(update={"training": training})
    with extra("torch"):
        from placer.estimator.estimate import estimate as estimate_here
    subject, inputs = _subject(model, example)
    with spinner("estimating"), users_code():
        found = estimate_here(subject, inputs, devices, options=options)
    gc.freeze()  # all that was made stays: the process ends soon
    return found


def _subject(model: str, example: Example) -> tuple[Any, Any]:
    """Return what to estimate, and its example inputs.

    Raises:
        InputError: the words name no model, or do not belong together.
    """
    if ":" in model and not os.path.exists(model):
        return example.load(model, on_meta=True)
    if example.arg:
        raise InputError(f"--arg {example.arg[0]} goes with a callable; {model} is a path")
    if not example.input:
        return model, None
    if len(example.input) == 1 and re.fullmatch(r"\d+(x\d+)*", example.input[0]):
        return model, tuple(map(int, example.input[0].split("x")))
    with extra("torch"):
        from placer.cli.model_arguments import parse_inputs
        from placer.estimator.meta_models import made_on_meta
    return model, made_on_meta(lambda: parse_inputs(example.input))
