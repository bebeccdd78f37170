"""The table of an evaluation: the verdict first, then faults, devices and the best placement."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from placer.report.explain import MEASURES, device_table, value_text
from placer.schema import Evaluation
from placer.schema.judgement import Best
from placer.utils.units import count_text

MOST_INLINE = 40
"""Characters of an exported text that still fits into the verdict's line."""
SAME = 1e-6
"""Relative difference up to which two values count as equal."""
VISIBLE = 0.005
"""Relative difference up to which a gain would be shown as 1.00x or 0%."""


def evaluation_table(found: Evaluation) -> RenderableType:
    """Return an evaluation as a rich renderable."""
    style = "bold green" if found.valid else "bold red"
    # one line whatever the width is, for readers of pipes and for search
    parts: list[RenderableType] = [
        Text(verdict(found), style=style, no_wrap=True, overflow="ignore")
    ]
    if len(found.faults) > 1:
        parts.append(Text("\n".join(f"fault       {fault.detail}" for fault in found.faults)))
    if found.devices:
        parts.append(device_table(found.devices, "The map, by device"))
    if lines := [*_best_lines(found)]:
        parts.append(Text("\n".join(lines)))
    return Group(*parts)


def verdict(found: Evaluation) -> str:
    """Return one line: the map's value or first fault, and what the best placement would gain."""
    if found.faults:
        more = f" (and {len(found.faults) - 1} more)" if len(found.faults) > 1 else ""
        line = f"not valid: {found.faults[0].detail}{more}"
    else:
        line = f"valid: {MEASURES[found.objective]} {_value_text(found, found.objective_value)}"
    return f"{line}; {_gain_text(found, found.best)}" if found.best is not None else line


def _gain_text(found: Evaluation, best: Best) -> str:
    """Return what the best placement would gain over the map."""
    limited = f" for {found.format}" if found.format is not None else ""
    placement = best.placement
    if placement.infeasible is not None:
        return f"no placement{limited} is possible: {placement.infeasible.reason}"
    if not placement.layer_devices:
        return f"no placement{limited} was found in {placement.solve_time_s:.1f} s"
    if found.valid and found.above_best is not None and found.above_best <= SAME:
        if placement.status == "optimal":
            return f"no placement{limited} is better"
        bound = _value_text(found, found.bound)
        return f"no better placement{limited} was found in time, and the proven bound is {bound}"
    verb = "needs" if found.objective in ("memory", "devices") else "takes"
    text = f", {best.export.text!r}," if best.export and _is_inline(best.export.text) else ""
    value = _value_text(found, found.best_value)
    return f"the best placement{limited}{text} {verb} {value}{_difference_text(found, best)}"


def _difference_text(found: Evaluation, best: Best) -> str:
    if not found.valid or found.above_best is None or found.above_best <= VISIBLE:
        return ""
    if best.speedup is not None:
        return f" ({best.speedup:.2f}x faster)"
    return f" ({found.above_best / (1 + found.above_best):.0%} less)"


def _best_lines(found: Evaluation) -> Iterator[str]:
    """Yield the text of the best placement for its engine, and the notes about it."""
    exported = found.best.export if found.best is not None else None
    if exported is None or (found.valid and (found.above_best or 0.0) <= SAME):
        return
    yield from exported.notes
    if not _is_inline(exported.text):
        yield f"The best placement for {exported.format}:"
        yield exported.text


def _is_inline(text: str) -> bool:
    return "\n" not in text and len(text) <= MOST_INLINE


def _value_text(found: Evaluation, value: float | None) -> str:
    if value is None:
        return "unknown"
    if found.objective == "devices":
        return count_text(round(value), "device")
    return value_text(found.objective, value)
