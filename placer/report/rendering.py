"""Rendering of tables: as plain text, and with fewer columns on narrow terminals."""

from __future__ import annotations

import io

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement

PAGE_WIDTH = 110
"""Width of a line that fits a page of HTML, in characters."""

_ANY_WIDTH = 10_000


class Fitting:
    """The first renderable that fits the width; the last if none fits.

    Less important columns are left out in this way, where rich would wrap numbers.

    Args:
        choices: the renderables, widest first.
    """

    def __init__(self, *choices: RenderableType) -> None:
        self._choices = choices

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the renderable to print."""
        # measured without a limit, since rich would otherwise report the wrapped width
        free = options.update(max_width=_ANY_WIDTH)
        for choice in self._choices[:-1]:
            if Measurement.get(console, free, choice).maximum <= options.max_width:
                yield choice
                return
        yield self._choices[-1]


def plain_text(shown: RenderableType, width: int = 120) -> str:
    """Return a table as plain text.

    Names of layers appear unchanged, also where they look like rich's markup or emoji.

    Args:
        shown: the table.
        width: of a line, in characters.
    """
    file = io.StringIO()
    # FORCE_COLOR would otherwise add escape sequences
    console = Console(
        file=file, width=width, force_terminal=False, no_color=True, markup=False, emoji=False
    )
    console.print(shown)
    return file.getvalue()
