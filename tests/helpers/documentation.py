"""README and the pages of the documentation, with their code blocks and links."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").rglob("*.md")))

_FENCE = re.compile(
    r"(?:^<!-- (?P<mark>not run|needs): (?P<note>[^\n]+) -->\n)?"
    r"^```(?P<kind>\w*)(?: title=\"(?P<title>[^\"\n]+)\")?\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


class Block(NamedTuple):
    """A fenced block of code.

    Attributes:
        page: The file, relative to the root.
        line: The line of its fence.
        kind: The language: ``python``, ``sh``, or ``text`` for what the block before it prints.
        text: The code.
        title: The file that the block shows; empty if it has no title. A command of the page runs
            that file.
        not_run: The reason why no test of the documentation runs it; empty if a test does.
        needs: The package without which a test skips it; empty if none.
        after: The kind of the block before it in the page; empty where that block does not run.
    """

    page: str
    line: int
    kind: str
    text: str
    title: str = ""
    not_run: str = ""
    needs: str = ""
    after: str = ""

    @property
    def place(self) -> str:
        """The page and the line."""
        return f"{self.page}:{self.line}"


def blocks() -> list[Block]:
    """Return every fenced block of README and the pages."""
    return [block for page in PAGES for block in _blocks(page)]


def _blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    before = ""
    for found in _FENCE.finditer(text):
        line = text[: found.start("kind")].count("\n") + 1
        marks = {found["mark"]: found["note"]}
        block = Block(
            page=str(page.relative_to(ROOT)),
            line=line,
            kind=found["kind"],
            text=found["text"],
            title=found["title"] or "",
            not_run=marks.get("not run", ""),
            needs=marks.get("needs", ""),
            after=before,
        )
        yield block
        before = "" if block.not_run or block.needs or block.title else block.kind


def program(page_blocks: Sequence[Block]) -> str:
    """Return the Python blocks of one page as one program.

    A later block may use names of an earlier one, as a reader does who types them in. Each line of
    code keeps the number that it has in the page, so that a traceback points into the page.
    """
    lines: list[str] = []
    for block in page_blocks:
        lines += [""] * (block.line - len(lines)) + block.text.splitlines()
    return "\n".join(lines) + "\n"


def missing_outputs(page_outputs: Sequence[Block], printed: str) -> list[str]:
    """Return the places of the outputs that were not printed, in their order.

    In an output, ``...`` stands for any text.
    """
    printed = re.sub(r" +$", "", printed, flags=re.MULTILINE)  # tables end with spaces
    missing, start = [], 0
    for block in page_outputs:
        pattern = ".*?".join(re.escape(part) for part in block.text.strip().split("..."))
        found = re.compile(pattern, re.DOTALL).search(printed, start)
        if found is None:
            missing.append(block.place)
        else:
            start = found.end()
    return missing


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
