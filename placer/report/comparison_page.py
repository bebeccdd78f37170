"""A comparison of two profiles or placements as one HTML file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape

from placer.report.charts import Bar, bars, drawing
from placer.report.comparing import Change, Comparison, ProfileComparison, comparison_table
from placer.report.page import legend, page
from placer.report.rendering import PAGE_WIDTH, plain_text
from placer.utils.units import bytes_text, ms_text

_SHOWN = 12


def comparison_report(found: Comparison) -> str:
    """Return a report with bars for the largest changes and the whole table.

    Returns:
        One self-contained HTML document.
    """
    if isinstance(found, ProfileComparison):
        title = "Two profiles"
        drawn = [
            _bars(
                f"Time on {kind}, largest changes",
                {layer.name: layer.time_ms[kind] for layer in found.layers},
                ms_text,
            )
            for kind in found.time_ms
        ]
        memory = {layer.name: layer.memory_bytes for layer in found.layers}
        drawn.append(_bars("Memory, largest changes", memory, bytes_text))
    else:
        title = "Two placements"
        drawn = [
            _bars("Time per micro-batch", found.load_ms, ms_text),
            _bars("Memory", found.memory_bytes, bytes_text),
        ]
    return page(title, [*drawn, _table(found)])


def _bars(title: str, changes: Mapping[str, Change], text: Callable[[float], str]) -> str:
    """Return two bars for each of the largest changes, or a note that nothing changed."""
    moved = {name: change for name, change in changes.items() if change.first != change.second}
    # by absolute change: relative changes of tiny layers are noise
    largest = sorted(
        moved, key=lambda name: -abs((moved[name].second or 0.0) - (moved[name].first or 0.0))
    )[:_SHOWN]
    if not largest:
        return f"<h2>{escape(title)}</h2><p>nothing changed</p>"
    rows = []
    for name in largest:
        change = moved[name]
        ratio = "" if change.ratio is None else f", {change.ratio:.2f} of the first"
        for which, color, value in (("first", 0, change.first), ("second", 1, change.second)):
            figure = "-" if value is None else text(value)
            label = name if which == "first" else ""
            figure += ratio if which == "second" else ""
            rows.append(Bar(label, [(which, color, value or 0.0)], figure))
    return (
        f"<h2>{escape(title)}</h2>{legend([('first', 0), ('second', 1)])}"
        f"{drawing(title, *bars(rows, text))}"
    )


def _table(found: Comparison) -> str:
    return f"<h2>All</h2><pre>{escape(plain_text(comparison_table(found), PAGE_WIDTH))}</pre>"
