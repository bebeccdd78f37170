"""Tables that omit less important columns on narrow terminals instead of wrapping numbers."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement

_ANY_WIDTH = 10_000


class Fitting:
    """The first renderable that fits the width; the last if none fits.

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
