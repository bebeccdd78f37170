"""The table of a joint placement: the devices in a request, and each model with its share of it."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from placer.report.explain import device_table, proven, segment_texts
from placer.schema.joint import JointPlacement
from placer.utils.units import ms_text


def joint_table(found: JointPlacement) -> RenderableType:
    """Return the devices with all models, then each model, then the proofs."""
    if not found.placements:
        return Text("\n".join(proven(found.joint)), style="bold red")
    title = f"Request of {len(found.runs)} models: {', '.join(found.runs)}"
    proofs = Text("\n".join(_proofs(found)))
    return Group(device_table(found.devices, title), _models(found), proofs)


def _proofs(found: JointPlacement) -> list[str]:
    """Return the lines of a placement, with the objective in the words of a request."""
    apart = ("objective ", "batch ")
    return [
        f"objective   time of a request {ms_text(found.request_ms or 0.0)}",
        *(line for line in proven(found.joint) if not line.startswith(apart)),
    ]


def _models(found: JointPlacement) -> Table:
    grid = Table(title="One run of each model", title_justify="left")
    grid.add_column("model")
    for heading in ("runs", "latency", "share of the request"):
        grid.add_column(heading, justify="right")
    grid.add_column("layers")
    for name, placement in found.placements.items():
        latency_ms = placement.objective_value or 0.0
        whole_ms = found.request_ms or 0.0
        share = found.runs[name] * latency_ms / whole_ms if whole_ms else 0.0
        layers = "\n".join(segment_texts(placement))
        grid.add_row(name, str(found.runs[name]), ms_text(latency_ms), f"{share:.0%}", layers)
    return grid
