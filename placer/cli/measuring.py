"""``placer measure`` and ``placer refine``: run a placement and compare it with its prediction.

``refine`` then corrects the profile by the measured stages, and solves again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from placer.cli.files import load_placement, load_profile, load_question, write_text, writing
from placer.cli.option_fields import Words, expanded
from placer.cli.options import Example, Model, Printed, in_a_folder
from placer.cli.terminal import extra, profiling_log, spinner, users_code
from placer.errors import InputError
from placer.report.timeline import Measurement
from placer.schema import Placement, PlacementRequest, Profile, RefineOptions


@expanded()
def measure(
    model: Model,
    placement: Annotated[
        str, typer.Argument(metavar="PLACEMENT|-", help="JSON of a placement; - for stdin")
    ],
    example: Example,
    chunks: Annotated[
        int | None, typer.Option(min=1, help="micro-batches; by default as in the placement")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="JSON that the placement was solved from: predicts"),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", callback=in_a_folder, help="write a trace for https://ui.perfetto.dev"
        ),
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="as it runs under torch.compile")
    ] = False,
    *,
    printed: Printed,
) -> None:
    """Run a batch under a placement, and measure when each device computes which micro-batch.

    The inputs are a whole batch. The loss of a training step is the mean square of the outputs,
    and there is no optimizer.
    """
    where, known = load_placement(placement), None if profile is None else load_profile(profile)
    with spinner("measuring"):
        found = _measured(model, example, where, chunks, known, compile)
    printed.emit(found)
    if trace is not None:
        with writing(trace):
            found.save_trace(trace)


@users_code()
def _measured(
    model: str,
    example: Example,
    placement: Placement,
    chunks: int | None,
    known: Profile | None,
    compiles: bool,
) -> Measurement:
    with extra("torch"):
        import torch

        from placer.capture.pytrees import flatten
        from placer.executor.dataflow import DataFlow
    if not example.input:
        raise InputError("give the inputs of a whole batch: --input 32x3x224x224")
    loaded, batch = example.load(model)
    _refuse_other_model(placement, loaded)
    module = loaded.train(placement.training)
    replicas = (one.device for members in placement.replicas.values() for one in members)
    used = {*placement.layer_devices.values(), *replicas}
    flow = DataFlow(module, sorted(used))
    flow.update_flow(placement)
    if not placement.training:
        return flow.measure(batch, chunks=chunks, profile=known, compile=compiles)

    def mean_square(result: Any, _: Any) -> torch.Tensor:
        numbers = [
            leaf.float().pow(2).mean() for leaf in flatten(result)[0] if leaf.is_floating_point()
        ]
        return torch.stack(numbers).sum()

    step = flow.train_step(mean_square, compile=compiles)
    return flow.measure(batch, step=step, chunks=chunks, profile=known)


def _refuse_other_model(placement: Placement, module: Any) -> None:
    """Raise an InputError if a placement is of a model of another class.

    Layers are often named alike: every ``nn.Sequential`` has a layer ``0``.
    """
    made = type(module).__name__
    if placement.model and placement.model != made:
        raise InputError(
            f"the placement is of a model {placement.model}, and MODEL makes a {made}; give the"
            f" placement of this model, or a MODEL that makes a {placement.model}"
        )


@expanded(RefineOptions)
def refine(
    model: Model,
    placement: Annotated[
        str, typer.Argument(metavar="PLACEMENT|-", help="JSON of a placement; - for stdin")
    ],
    example: Example,
    profile: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="the profile or request that it answers; measured again if left out",
        ),
    ] = None,
    *,
    words: Words[RefineOptions],
    placement_output: Annotated[
        Path | None,
        typer.Option(
            "--save-placement",
            metavar="FILE",
            callback=in_a_folder,
            help="write the best placement alone, too",
        ),
    ] = None,
    printed: Printed,
) -> None:
    """Measure a placement's stages, correct the profile by them, and solve again.

    This repeats until the placement stays the same. The inputs are one micro-batch. Each round's
    prediction and measurement are shown. The JSON has the best placement that was measured, the
    corrected profile, and the rounds.
    """
    where, question = load_placement(placement), None if profile is None else load_question(profile)
    with extra("torch"):
        from placer.refinement.refine import refine as refine_here
    options = words.read()
    measuring: dict[str, Any] = {
        "request" if isinstance(question, PlacementRequest) else "profile": question
    }
    module, inputs = example.load(model)
    _refuse_other_model(where, module)
    with profiling_log(), spinner("measuring stages"), users_code():
        found = refine_here(where, module, inputs, options=options, **measuring)
    printed.emit(found)
    if placement_output is not None:
        write_text(placement_output, found.placement.to_json() + "\n")
