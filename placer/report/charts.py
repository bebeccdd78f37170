"""SVG charts: stacked columns along a model's layers, and stacked bars for devices.

They contain shapes, text, and a tooltip for each shape; no scripts and no external references.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate

from placer.utils.units import Text

WIDTH = 960
"""Width of every chart in its own units; the page scales it."""

# more columns would be narrower than six units
_MOST_COLUMNS = 160
# column charts: total height, margins, and space for the axis labels
_HEIGHT, _TOP, _BOTTOM, _LEFT = 190, 8, 26, 74
# bars: height, distance, and space for the texts before and after them
_BAR, _STEP, _NAMES, _FIGURES = 18, 28, 150, 190
_TICKS = 4

STYLE = """
svg{display:block;width:100%;height:auto}
svg text{font:12px system-ui,sans-serif;fill:var(--text,#16191d)}
svg .faint{fill:var(--faint,#57606a)}
svg .axis{stroke:var(--line,#c9d1d9);stroke-width:1}
svg .limit{stroke:var(--text,#16191d);stroke-width:2;stroke-dasharray:4 3}
svg .c0{fill:#0072b2}svg .c1{fill:#e69f00}svg .c2{fill:#009e73}svg .c3{fill:#cc79a7}
svg .c4{fill:#56b4e9}svg .c5{fill:#d55e00}svg .c6{fill:#f0e442}svg .c7{fill:#8c8c8c}
"""
"""Styles of the charts; colours of Okabe and Ito's palette, distinguishable with colour blindness.
"""


@dataclass(frozen=True)
class Part:
    """One series of a chart.

    Attributes:
        name: the text in the legend.
        color: 0 to 7.
        values: one for each column, at least 0.
    """

    name: str
    color: int
    values: Sequence[float]


@dataclass(frozen=True)
class Chart:
    """Columns of stacked parts.

    Attributes:
        title: the heading.
        labels: one for each column.
        parts: the series, from the bottom up.
        text: formats a value with its unit.
    """

    title: str
    labels: Sequence[str]
    parts: Sequence[Part]
    text: Text


@dataclass(frozen=True)
class Bar:
    """One bar of stacked parts.

    Attributes:
        label: the text before it.
        values: name, colour and size of each part.
        figure: the text after it.
        limit: the value of a mark; None for no mark.
    """

    label: str
    values: Sequence[tuple[str, int, float]]
    figure: str
    limit: float | None = None


def columns(chart: Chart) -> tuple[str, int]:
    """Draw the columns; too many neighbours are merged.

    Returns:
        The shapes, and their height.
    """
    labels, parts = _gathered(chart)
    totals = [sum(part.values[index] for part in parts) for index in range(len(labels))]
    # 1.0 avoids a division by zero for an empty chart
    most = max(totals, default=0) or 1.0
    plot = _HEIGHT - _TOP - _BOTTOM
    shapes = [
        _grid_line(most * tick / _TICKS, _TOP + plot * (1 - tick / _TICKS), chart.text)
        for tick in range(_TICKS + 1)
    ]
    step = (WIDTH - _LEFT) / max(1, len(labels))
    for index, label in enumerate(labels):
        # lower and upper edges of the stacked parts
        tops = list(accumulate((part.values[index] for part in parts), initial=0.0))
        for part, below, above in zip(parts, tops, tops[1:], strict=False):
            if above > below:
                words = f"{label}: {part.name} {chart.text(part.values[index])}"
                x, width = _LEFT + index * step, step * (0.9 if step > 3 else 1.0)
                y, height = _TOP + plot * (1 - above / most), plot * (above - below) / most
                shapes.append(_rect(x, y, width, height, part.color, words))
    if labels:
        shapes.append(_label(_LEFT, _HEIGHT - 8, labels[0], "start", "faint"))
        shapes.append(_label(WIDTH, _HEIGHT - 8, labels[-1], "end", "faint"))
    return "".join(shapes), _HEIGHT


def bars(rows: Sequence[Bar], text: Text) -> tuple[str, int]:
    """Draw bars below one another, to the same scale.

    Returns:
        The shapes, and their height.
    """
    longest = (max(sum(value for _, _, value in row.values), row.limit or 0.0) for row in rows)
    scale = (WIDTH - _NAMES - _FIGURES) / (max(longest, default=0) or 1.0)
    shapes = []
    for number, row in enumerate(rows):
        y, x = number * _STEP + 4, float(_NAMES)
        shapes.append(_label(_NAMES - 8, y + 13, row.label, "end"))
        for name, color, value in row.values:
            if value > 0:
                words = f"{row.label}: {name} {text(value)}"
                shapes.append(_rect(x, y, value * scale, _BAR, color, words))
                x += value * scale
        if row.limit is not None:
            at = _NAMES + row.limit * scale
            shapes.append(
                f'<line class="limit" x1="{at:.1f}" x2="{at:.1f}" '
                f'y1="{y - 3}" y2="{y + _BAR + 3}"/>'
            )
        shapes.append(_label(WIDTH - _FIGURES + 8, y + 13, row.figure, "start"))
    return "".join(shapes), max(1, len(rows) * _STEP)


def drawing(title: str, shapes: str, height: int, style: bool = False) -> str:
    """Return shapes as an ``svg`` element.

    Args:
        title: the accessible name.
        shapes: from ``columns`` or ``bars``.
        height: the height of the shapes.
        style: whether to include the colours, as a separate file needs.
    """
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}">{f"<style>{STYLE}</style>" if style else ""}{shapes}</svg>'
    )


def legend(parts: Sequence[tuple[str, int]], y: int = 0) -> tuple[str, int]:
    """Return the legend as one line of shapes, and its height."""
    shapes, x = [], _LEFT
    for name, color in parts:
        shapes.append(f'<rect class="c{color}" x="{x}" y="{y + 4}" width="12" height="12"/>')
        shapes.append(_label(x + 17, y + 14, name, "start"))
        # about 7 units per character of the 12-pixel font, and 32 for the square and gaps
        x += 32 + 7 * len(name)
    return "".join(shapes), 22


def _gathered(chart: Chart) -> tuple[list[str], list[Part]]:
    """Return at most ``_MOST_COLUMNS`` columns: the sums of neighbours."""
    count = len(chart.labels)
    # number of layers per column, rounded up
    size = -(-count // _MOST_COLUMNS) or 1
    starts = range(0, count, size)
    labels = [
        chart.labels[start]
        if size == 1
        else f"{chart.labels[start]} … {chart.labels[min(count, start + size) - 1]}"
        for start in starts
    ]
    return labels, [
        Part(part.name, part.color, [sum(part.values[start : start + size]) for start in starts])
        for part in chart.parts
    ]


def _grid_line(value: float, y: float, text: Text) -> str:
    line = f'<line class="axis" x1="{_LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return line + _label(_LEFT - 6, y + 4, text(value), "end", "faint")


def _rect(x: float, y: float, width: float, height: float, color: int, words: str) -> str:
    return (
        f'<rect class="c{color}" x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="{height:.2f}">'
        f"<title>{escape(words)}</title></rect>"
    )


def _label(x: float, y: float, words: str, anchor: str, kind: str = "") -> str:
    # module paths differ most at their ends
    shown = words if len(words) <= 48 else f"{words[:22]}…{words[-22:]}"
    mark = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{mark}>{escape(shown)}</text>'
