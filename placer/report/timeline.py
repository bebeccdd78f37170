"""Timelines of a batch on each device and link, measured and predicted.

A trace for Perfetto and Chrome shows a process for each timeline, and a thread for each device and
link:

    measured    cuda:0                     |forward 0|forward 1|
                cuda:1                                  |forward 0|forward 1|
                cuda:0 → cuda:1 values               |0|       |1|

Arrows lead from the pass that made a value through its transfer to the pass that reads it.

Source: "Trace Event Format", Google; the events X (a slice), M (names) and s, t, f (an arrow's
start, step and end).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ValidationError
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from placer.errors import InputError
from placer.report.rendering import plain_text
from placer.schema.faults import first_fault
from placer.utils.atomic_files import write_whole
from placer.utils.units import ms_text

Event = dict[str, Any]

_TRANSFERS = ("inputs", "values", "gradients", "results")

Kind = Literal[
    "forward", "backward", "weights", "inputs", "values", "gradients", "results", "optimizer"
]
"""A pass, the content of a transfer, or the optimizer's step."""

PASSES: tuple[Kind, ...] = ("forward", "backward", "weights")


class Row(NamedTuple):
    """A pass or a transfer of one micro-batch, or a device's optimizer step.

    Attributes:
        lane: the device, or ``source → target`` of a transfer.
        kind: the pass, the content of a transfer, or ``optimizer``.
        stage: where a pass runs or a transfer starts; None for inputs, which come from outside, and
            for the optimizer.
        target: the stage that receives a transfer; None for passes, and for results, which leave.
        micro_batch: from 0; 0 for the optimizer.
        start_ms: since the first start of the timeline.
        end_ms: since the first start of the timeline.
    """

    lane: str
    kind: Kind
    stage: int | None
    target: int | None
    micro_batch: int
    start_ms: float
    end_ms: float


class Comparison(NamedTuple):
    """A measured pass and its prediction (None without one).

    Times are in milliseconds since the first start.
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
        predicted: passes and transfers simulated from a profile; empty without one.
        notes: remarks for the reader.
    """

    title: str
    devices: tuple[str, ...]
    measured: tuple[Row, ...]
    predicted: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def measured_ms(self) -> float:
        """Return the time from the first pass's start to the last pass's end."""
        return _span_ms(self.measured)

    @property
    def predicted_ms(self) -> float | None:
        """Return the predicted time of all passes; None without a prediction."""
        return _span_ms(self.predicted) if self.predicted else None

    @property
    def rows(self) -> tuple[Comparison, ...]:
        """Return every pass, ordered by start, with its prediction."""
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
        """Return the computing time of a device in milliseconds.

        Args:
            device: its name.
            predicted: whether to return the predicted time.
        """
        rows = _passes(self.predicted if predicted else self.measured)
        return sum(row.end_ms - row.start_ms for row in rows if row.lane == device)

    def table(self, width: int = 120) -> str:
        """Return measured and predicted busy and idle time of each device as plain text.

        Args:
            width: of a line, in characters (default 120).
        """
        return plain_text(self, width)

    def to_json(self) -> str:
        """Return the figures of each device, every pass and every transfer as JSON.

        Each entry has a line of its own.
        """
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
                # one line per pass keeps files diffable
                text = "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in value) + "\n ]"
            lines.append(f" {json.dumps(key)}: {text}")
        return "{\n" + ",\n".join(lines) + "\n}"

    @classmethod
    def from_json(cls, text: str) -> Measurement:
        """Return the measurement that ``to_json`` wrote.

        Raises:
            InputError: if the text is not such a measurement.
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
            path: the JSON file to write.
        """
        save(path, {"measured": self.measured, "predicted": self.predicted}, self.devices)

    def __rich__(self) -> RenderableType:
        """Return the table to print."""
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
        passes = sum(row.lane == device for row in _passes(self.measured))
        cells = [device, str(passes), ms_text(busy_ms), _idle_text(busy_ms, self.measured_ms)]
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
    """The fields of the JSON that rebuild a measurement; the figures are derived from them."""

    title: str
    devices: tuple[_OfDevice, ...]
    measured: tuple[Row, ...]
    predicted: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()


def from_first_start(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return the rows ordered by start, shifted so that the first starts at 0."""
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


def save(
    path: str | PathLike[str], timelines: Mapping[str, Sequence[Row]], devices: Sequence[str]
) -> None:
    """Write timelines to a file.

    Args:
        path: the JSON file to write.
        timelines: by name; empty timelines are left out.
        devices: in display order.
    """
    content = {"traceEvents": events(timelines, devices), "displayTimeUnit": "ms"}
    write_whole(Path(path), json.dumps(content))


def events(timelines: Mapping[str, Sequence[Row]], devices: Sequence[str]) -> list[Event]:
    """Return the events of a trace, with times in microseconds.

    Args:
        timelines: by name; empty timelines are left out.
        devices: in display order.
    """
    made: list[Event] = []
    arrows = count(1)
    for process, (name, rows) in enumerate(timelines.items(), 1):
        if not rows:
            continue
        threads = _threads(rows, devices)
        made.append(_named("process_name", process, 0, name=name))
        made.append(_named("process_sort_index", process, 0, sort_index=process))
        for thread, number in threads.items():
            made.append(_named("thread_name", process, number, name=thread))
            made.append(_named("thread_sort_index", process, number, sort_index=number))
        made += [_slice(row, process, threads[_thread(row)]) for row in rows]
        passes = {
            (row.stage, row.kind, row.micro_batch): row
            for row in rows
            if row.kind not in _TRANSFERS
        }
        for row in rows:
            if row.kind in _TRANSFERS:
                made += _arrow(row, passes, process, threads, arrows)
    return made


def _thread(row: Row) -> str:
    """Return the thread of a row; transfers of different kinds may overlap, so each has its own."""
    return f"{row.lane} {row.kind}" if row.kind in _TRANSFERS else row.lane


def _threads(rows: Sequence[Row], devices: Sequence[str]) -> dict[str, int]:
    """Return the number of each thread: devices, then links in the order of first transfers."""
    there = {_thread(row) for row in rows}
    names = [device for device in devices if device in there]
    names += [_thread(row) for row in rows if _thread(row) not in names]
    return {name: number for number, name in enumerate(dict.fromkeys(names), 1)}


def _named(event: str, process: int, thread: int, **arguments: Any) -> Event:
    return {"ph": "M", "name": event, "pid": process, "tid": thread, "ts": 0, "args": arguments}


def _slice(row: Row, process: int, thread: int) -> Event:
    return {
        "ph": "X",
        "name": "optimizer" if row.kind == "optimizer" else f"{row.kind} {row.micro_batch}",
        "cat": row.kind,
        "pid": process,
        "tid": thread,
        "ts": 1e3 * row.start_ms,
        "dur": 1e3 * (row.end_ms - row.start_ms),
        "args": {"stage": row.stage, "to stage": row.target, "micro-batch": row.micro_batch},
    }


def _arrow(
    row: Row,
    passes: Mapping[Any, Row],
    process: int,
    threads: Mapping[str, int],
    arrows: Iterator[int],
) -> Iterator[Event]:
    """Yield the arrow from the pass before a transfer through it to the pass that waits for it."""
    phase = "backward" if row.kind == "gradients" else "forward"
    path = [
        passes.get((row.stage, phase, row.micro_batch)),
        row,
        passes.get((row.target, phase, row.micro_batch)),
    ]
    # inputs have no pass before them, results none after them
    stations = [station for station in path if station is not None]
    if len(stations) < 2:
        return
    number = next(arrows)
    for index, station in enumerate(stations):
        event: Event = {"ph": "t", "name": row.kind, "cat": "flow", "id": number, "pid": process}
        # anchor the arrow in the middle of the slice: 1e3 us per ms, halved
        event |= {"tid": threads[_thread(station)], "ts": 500 * (station.start_ms + station.end_ms)}
        if index == 0:
            event["ph"] = "s"
        elif index == len(stations) - 1:
            # bp "e" binds the arrow's end to the enclosing slice
            event |= {"ph": "f", "bp": "e"}
        yield event
