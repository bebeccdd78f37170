"""A table of a refinement: each round's predictions and measurements."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from placer.schema.refinement import Refinement, Round, StageTime
from placer.utils.units import bytes_text, ms_text

_STOP_REASONS = {
    "converged": "converged: solving again moves nothing, or gains too little",
    "repeated": "ended: solving again leads back to a placement that was measured before",
    "max-rounds": "ended: as many rounds as were allowed",
}


def refinement_table(refinement: Refinement) -> RenderableType:
    """Return a row for each round and stage, with prediction, measurement and difference.

    Below it, lines report each round, how the refinement ended, and the gain of compiled stages in
    the last round.
    """
    grid = Table(
        title=f"Refinement of {refinement.placement.model or 'model'}", title_justify="left"
    )
    grid.add_column("round", justify="right")
    grid.add_column("stage")
    for heading in ("layers", "predicted", "measured", "off by", "loss in it"):
        grid.add_column(heading, justify="right")
    for number, one in enumerate(refinement.rounds, start=1):
        for index, stage in enumerate(one.stages):
            # a line in the table after each round
            last = index == len(one.stages) - 1
            grid.add_row(str(number) if index == 0 else "", *_cells(stage), end_section=last)
    lines = [_round_text(number, one) for number, one in enumerate(refinement.rounds, start=1)]
    compiled = [line for stage in refinement.rounds[-1].stages for line in _compiled(stage)]
    return Group(grid, Text("\n".join([*lines, *compiled, _STOP_REASONS[refinement.stop_reason]])))


def _cells(stage: StageTime) -> tuple[str, ...]:
    loss_ms = stage.loss_forward_ms + stage.loss_backward_ms
    off = stage.predicted_ms / stage.measured_ms - 1 if stage.measured_ms else None
    return (
        stage.device,
        str(len(stage.layers)),
        ms_text(stage.predicted_ms),
        ms_text(stage.measured_ms),
        "-" if off is None else f"{off:+.1%}",
        ms_text(loss_ms) if loss_ms else "",
    )


def _compiled(stage: StageTime) -> list[str]:
    if stage.compiled:
        return [f"{stage.device} compiled: {stage.compiled}"]
    return (
        [f"{stage.device} not compiled: {stage.not_compiled_because}"]
        if stage.not_compiled_because
        else []
    )


def _round_text(number: int, one: Round) -> str:
    shown = bytes_text if one.placement.objective == "memory" else ms_text
    text, was = shown(one.predicted_value), shown(one.measured_value)
    return f"round {number}     {one.placement.objective}: {text} predicted, {was} measured"
