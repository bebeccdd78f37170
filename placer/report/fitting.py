"""Tables that leave out what is least wanted where a terminal is narrow, rather than break numbers
over lines.
"""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement

_ANY_WIDTH = 10_000


class Fitting:
    """The first of some renderables that there is room for; the last where there is room for none.

    Args:
        choices: the widest first.
    """

    def __init__(self, *choices: RenderableType) -> None:
        self._choices = choices

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """What rich prints."""
        free = options.update(max_width=_ANY_WIDTH)
        for choice in self._choices[:-1]:
            if Measurement.get(console, free, choice).maximum <= options.max_width:
                yield choice
                return
        yield self._choices[-1]
