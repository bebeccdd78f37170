"""``placer measure``: run a placement here, and set its timeline beside the predicted one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from placer.cli.files import emit, load_placement, load_profile, writing
from placer.cli.options import Arguments, AsJson, Inputs, Model, Output, in_a_folder
from placer.cli.terminal import extra, spinner, users_code
from placer.errors import InputError
from placer.report.timeline import Measurement
from placer.schema import Placement, Profile


def measure(
    model: Model,
    placement: Annotated[
        str, typer.Argument(metavar="PLACEMENT|-", help="JSON of a placement; - for stdin")
    ],
    arg: Arguments = [],  # noqa: B006
    input: Inputs = [],  # noqa: B006
    chunks: Annotated[
        int | None, typer.Option(min=1, help="micro-batches; what the placement says if left out")
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
    output: Output = None,
    json: AsJson = False,
) -> None:
    """Run a batch as a placement says, and measure when each device works on which micro-batch.

    The inputs are a whole batch. A training step has the mean square of the results for its loss,
    and no optimizer.
    """
    where, known = load_placement(placement), None if profile is None else load_profile(profile)
    with spinner("measuring"):
        found = _measured(model, arg, input, where, chunks, known, compile)
    emit(found, output, json)
    if trace is not None:
        with writing(trace):
            found.save_trace(trace)


@users_code()
def _measured(
    model: str,
    arguments: list[str],
    inputs: list[str],
    placement: Placement,
    chunks: int | None,
    known: Profile | None,
    compiles: bool,
) -> Measurement:
    with extra("torch"):
        import torch

        from placer.capture.pytrees import flatten
        from placer.executor.dataflow import DataFlow
        from placer.model_spec import load_model, parse_inputs
    if not inputs:
        raise InputError("give the inputs of a whole batch: --input 32x3x224x224")
    module = load_model(model, arguments).train(placement.training)
    batch: Any = parse_inputs(inputs)
    flow = DataFlow(module, sorted(set(placement.layer_devices.values())))
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
