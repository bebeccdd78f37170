"""README and the pages of the documentation, with their code blocks and links."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").rglob("*.md")))

_FENCE = re.compile(
    r"(?:^<!-- not run: (?P<why>[^\n]+) -->\n)?^```(?P<kind>\w*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


class Block(NamedTuple):
    """A fenced block of code.

    Attributes:
        page: The file, relative to the root.
        line: The line of its fence.
        kind: The language, ``python`` or ``sh``.
        text: The code.
        not_run: The reason why no test of the documentation runs it; empty if one does.
    """

    page: str
    line: int
    kind: str
    text: str
    not_run: str

    @property
    def place(self) -> str:
        """The page and the line."""
        return f"{self.page}:{self.line}"


def blocks() -> list[Block]:
    """Return every fenced block of README and the pages."""
    return [block for page in PAGES for block in _blocks(page)]


def _blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in _FENCE.finditer(text):
        line = text[: found.start("kind")].count("\n") + 1
        yield Block(
            str(page.relative_to(ROOT)), line, found["kind"], found["text"], found["why"] or ""
        )


def prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return _FENCE.sub("", page.read_text())


def links(page: Path) -> list[str]:
    """Return the targets of a page's links, without those to other hosts."""
    return [
        target
        for target in _LINK.findall(prose(page))
        if not target.startswith(("http://", "https://"))
    ]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as the site's generator and code hosts make them."""
    slugs = (
        re.sub(r"[^\w\s-]", "", heading).strip().lower()
        for heading in _HEADING.findall(prose(page))
    )
    return {re.sub(r"[-\s]+", "-", slug) for slug in slugs}
