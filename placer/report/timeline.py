"""What a batch did on each device and link, beside what was predicted of it."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ValidationError
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from placer.errors import InputError
from placer.report.trace import save
from placer.schema.faults import first_fault
from placer.utils.units import ms_text

__all__ = ["Comparison", "Measurement", "Row"]

Kind = Literal[
    "forward", "backward", "weights", "inputs", "values", "gradients", "results", "optimizer"
]
"""Passes, what transfers carry, and the optimizer's step."""

PASSES: tuple[Kind, ...] = ("forward", "backward", "weights")


class Row(NamedTuple):
    """A pass or a transfer of one micro-batch, or a device's step of the optimizer.

    Attributes:
        lane: the device, or ``source → target`` of a transfer.
        kind: a pass's phase, what a transfer carries, or ``optimizer``.
        stage: where a pass runs, or a transfer starts; None for inputs, which come from outside,
            and the optimizer.
        target: the stage that a transfer goes to; None for passes, and for results, which leave.
        micro_batch: from 0; 0 for the optimizer.
        start_ms: from the first start of the timeline.
        end_ms: from the same.
    """

    lane: str
    kind: Kind
    stage: int | None
    target: int | None
    micro_batch: int
    start_ms: float
    end_ms: float


class Comparison(NamedTuple):
    """A pass as it was measured, beside its prediction, in milliseconds from the first start; None
    without one.
    """

    device: str
    stage: int
    kind: Kind
    micro_batch: int
    start_ms: float
    end_ms: float
    predicted_start_ms: float | None
    predicted_end_ms: float | None


@dataclass(frozen=True)
class Measurement:
    """A measured timeline and the predicted one.

    Attributes:
        title: what ran.
        devices: their names, in the order of their first stages.
        measured: passes and transfers.
        predicted: the same, simulated from a profile; empty without one.
        notes: what a reader should know of them.
    """

    title: str
    devices: tuple[str, ...]
    measured: tuple[Row, ...]
    predicted: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def measured_ms(self) -> float:
        """From the start of the first pass to the end of the last."""
        return _span_ms(self.measured)

    @property
    def predicted_ms(self) -> float | None:
        """The same, predicted; None without a prediction."""
        return _span_ms(self.predicted) if self.predicted else None

    @property
    def rows(self) -> tuple[Comparison, ...]:
        """Every pass by its start, measured beside predicted."""
        predicted = {(row.stage, row.kind, row.micro_batch): row for row in self.predicted}
        found = []
        for row in sorted(_passes(self.measured), key=lambda row: row.start_ms):
            assert row.stage is not None  # every pass has one
            other = predicted.get((row.stage, row.kind, row.micro_batch))
            times = (None, None) if other is None else (other.start_ms, other.end_ms)
            found.append(
                Comparison(
                    row.lane, row.stage, row.kind, row.micro_batch, row.start_ms, row.end_ms, *times
                )
            )
        return tuple(found)

    def busy_ms(self, device: str, predicted: bool = False) -> float:
        """How long a device computes, in milliseconds.

        Args:
            device: its name.
            predicted: by the prediction instead.
        """
        rows = _passes(self.predicted if predicted else self.measured)
        return sum(row.end_ms - row.start_ms for row in rows if row.lane == device)

    def table(self, width: int = 120) -> str:
        """Per device busy and idle time, measured and predicted, as plain text.

        Args:
            width: of a line, in characters.
        """
        console = Console(file=io.StringIO(), width=width, no_color=True, force_terminal=False)
        with console.capture() as captured:
            console.print(self)
        return captured.get()

    def to_json(self) -> str:
        """The figures of each device, and every pass and transfer, as JSON with one of them a line."""
        content: dict[str, Any] = {
            "title": self.title,
            "measured_ms": self.measured_ms,
            "predicted_ms": self.predicted_ms,
            "devices": [self._device_figures(device) for device in self.devices],
            "measured": [row._asdict() for row in self.measured],
            "predicted": [row._asdict() for row in self.predicted],
            "notes": list(self.notes),
        }
        lines = []
        for key, value in content.items():
            text = json.dumps(value)
            if isinstance(value, list) and value:
                text = "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in value) + "\n ]"
            lines.append(f" {json.dumps(key)}: {text}")
        return "{\n" + ",\n".join(lines) + "\n}"

    @classmethod
    def from_json(cls, text: str) -> Measurement:
        """What ``to_json`` wrote.

        Raises:
            InputError: it is something else.
        """
        try:
            wire = _Measurement.model_validate_json(text)
        except ValidationError as error:
            raise InputError(first_fault(error, _Measurement)) from error
        return cls(
            wire.title,
            tuple(one.device for one in wire.devices),
            wire.measured,
            wire.predicted,
            wire.notes,
        )

    def _device_figures(self, device: str) -> dict[str, Any]:
        guess = self.busy_ms(device, predicted=True) if self.predicted else None
        return {"device": device, "busy_ms": self.busy_ms(device), "predicted_busy_ms": guess}

    def save_trace(self, path: str | PathLike[str]) -> None:
        """Write both timelines as a trace for https://ui.perfetto.dev or chrome://tracing.

        Args:
            path: of the JSON file.
        """
        save(path, {"measured": self.measured, "predicted": self.predicted}, self.devices)

    def __rich__(self) -> RenderableType:
        """What rich prints."""
        grid = Table(title=self.title, title_justify="left")
        grid.add_column("device")
        headings = ["passes", "busy", "idle"]
        if self.predicted:
            headings += ["busy, predicted", "idle, predicted", "measured / predicted"]
        for heading in headings:
            grid.add_column(heading, justify="right")
        for device in self.devices:
            grid.add_row(*self._device_row(device))
        grid.add_section()
        grid.add_row(*self._last_row())
        return Group(grid, Text("\n".join(self.notes))) if self.notes else grid

    def _device_row(self, device: str) -> list[str]:
        busy_ms = self.busy_ms(device)
        count = sum(row.lane == device for row in _passes(self.measured))
        cells = [device, str(count), ms_text(busy_ms), _idle_text(busy_ms, self.measured_ms)]
        if self.predicted_ms is not None:
            predicted_ms = self.busy_ms(device, predicted=True)
            cells += [
                ms_text(predicted_ms),
                _idle_text(predicted_ms, self.predicted_ms),
                _ratio(busy_ms, predicted_ms),
            ]
        return cells

    def _last_row(self) -> list[str]:
        cells = ["whole batch", str(len(_passes(self.measured))), ms_text(self.measured_ms), ""]
        if self.predicted_ms is not None:
            cells += [ms_text(self.predicted_ms), "", _ratio(self.measured_ms, self.predicted_ms)]
        return cells


class _OfDevice(BaseModel):
    device: str


class _Measurement(BaseModel):
    """What of a measurement's JSON it is made from again; the figures follow."""

    title: str
    devices: tuple[_OfDevice, ...]
    measured: tuple[Row, ...]
    predicted: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()


def from_first_start(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Rows by their start, the first of which is 0."""
    ordered = sorted(rows, key=lambda row: (row.start_ms, row.end_ms))
    zero = ordered[0].start_ms if ordered else 0.0
    return tuple(
        row._replace(start_ms=row.start_ms - zero, end_ms=row.end_ms - zero) for row in ordered
    )


def _passes(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row.kind in PASSES]


def _span_ms(rows: Sequence[Row]) -> float:
    passes = _passes(rows)
    if not passes:
        return 0.0
    return max(row.end_ms for row in passes) - min(row.start_ms for row in passes)


def _idle_text(busy_ms: float, span_ms: float) -> str:
    idle_ms = max(0.0, span_ms - busy_ms)
    return f"{ms_text(idle_ms)} {idle_ms / span_ms:.0%}" if span_ms else ms_text(idle_ms)


def _ratio(value: float, other: float) -> str:
    return f"{value / other:.2f}" if other else "-"
