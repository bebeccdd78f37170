"""Tables as plain text, for files, HTML pages and ``print``."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType

__all__ = ["PAGE_WIDTH", "plain_text"]

PAGE_WIDTH = 110
"""Width of a line that fits a page of HTML, in characters."""


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
