"""Timelines as a trace that Perfetto and Chrome show: a process for each, a thread for each device
and link.

    measured    cuda:0                     |forward 0|forward 1|
                cuda:1                                  |forward 0|forward 1|
                cuda:0 → cuda:1 values               |0|       |1|

Arrows lead from the pass that made a value through its transfer to the pass that reads it.

Source: "Trace Event Format", Google; the events X (a slice), M (names) and s, t, f (an arrow's
start, step and end).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placer.utils.atomic_files import write_whole

if TYPE_CHECKING:
    from placer.report.timeline import Row

__all__ = ["events", "save"]

Event = dict[str, Any]

_TRANSFERS = ("inputs", "values", "gradients", "results")


def save(
    path: str | PathLike[str], timelines: Mapping[str, Sequence[Row]], devices: Sequence[str]
) -> None:
    """Write timelines to a file.

    Args:
        path: of the JSON file.
        timelines: by name; empty ones are left out.
        devices: in the order in which they are shown.
    """
    content = {"traceEvents": events(timelines, devices), "displayTimeUnit": "ms"}
    write_whole(Path(path), json.dumps(content))


def events(timelines: Mapping[str, Sequence[Row]], devices: Sequence[str]) -> list[Event]:
    """The events of a trace, times in microseconds.

    Args:
        timelines: by name; empty ones are left out.
        devices: in the order in which they are shown.
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
    """Transfers of unlike kinds go side by side, so each kind has a thread of its own."""
    return f"{row.lane} {row.kind}" if row.kind in _TRANSFERS else row.lane


def _threads(rows: Sequence[Row], devices: Sequence[str]) -> dict[str, int]:
    """The number of each thread: devices first, then links in the order of their first transfer."""
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
    """From the pass that a transfer starts behind, through it, to the pass that waits for it."""
    phase = "backward" if row.kind == "gradients" else "forward"
    path = [
        passes.get((row.stage, phase, row.micro_batch)),
        row,
        passes.get((row.target, phase, row.micro_batch)),
    ]
    stations = [station for station in path if station is not None]
    if len(stations) < 2:
        return
    number = next(arrows)
    for index, station in enumerate(stations):
        event: Event = {"ph": "t", "name": row.kind, "cat": "flow", "id": number, "pid": process}
        event |= {"tid": threads[_thread(station)], "ts": 500 * (station.start_ms + station.end_ms)}
        if index == 0:
            event["ph"] = "s"
        elif index == len(stations) - 1:
            event |= {"ph": "f", "bp": "e"}
        yield event
