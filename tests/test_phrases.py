"""Tests that texts avoid the phrases of phrases_to_avoid.txt."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("phrases_to_avoid.txt")
PROGRAMS = ("placer", "server", "client", "examples", "docs")
PAGES = (
    "*.md",
    "docs/**/*.md",
    "docs/**/*.ipynb",
    "examples/**/*.md",
    "server/page/*.html",
    "server/page/*.js",
)


def phrases() -> list[tuple[re.Pattern[str], str]]:
    """Return each phrase to avoid and its replacement."""
    lines = [line for line in LIST.read_text().splitlines() if line and not line.startswith("#")]
    pairs = [re.split(r"\s+-> ", line, maxsplit=1) for line in lines]
    return [(re.compile(phrase.replace(" ", r"\s+"), re.I), text) for phrase, text in pairs]


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each block of comments, without the signs."""
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        if block and line != last + 1:
            yield first, "\n".join(block)
            block = []
        if not block:
            first = line
        block.append(token.string.lstrip("# "))
        last = line
    if block:
        yield first, "\n".join(block)


def strings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring, message and other string of several words."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def texts() -> Iterator[tuple[Path, int, str]]:
    """Yield every text for readers, with its file and first line."""
    for folder in PROGRAMS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            source = path.read_text()
            for line, text in (*comments(source), *strings(source)):
                yield path, line, text
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            yield path, 1, path.read_text()


def found(text: str) -> list[tuple[int, str, str]]:
    """Return the line offset, the phrase and the replacement of each phrase in a text."""
    return [
        (text.count("\n", 0, match.start()), " ".join(match.group().split()), replacement)
        for phrase, replacement in phrases()
        for match in phrase.finditer(text)
    ]


def test_no_text_for_readers_has_a_phrase_to_avoid() -> None:
    hits = [
        f"{path.relative_to(ROOT)}:{line + offset}: {phrase!r}; write: {replacement}"
        for path, line, text in texts()
        for offset, phrase, replacement in found(text)
    ]
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize(
    ("text", "phrase"),
    [
        ("The user is told the result.", "told"),
        ("The memory is that\n    of the model.", "that of"),
        ("There is none.", "is none"),
        ("It waits for what it needs.", "waits for what"),
    ],
)
def test_a_phrase_to_avoid_is_found(text: str, phrase: str) -> None:
    assert phrase in [each for _, each, _ in found(text)]


@pytest.mark.parametrize("text", ["`device` is None", "The total of the loads", "a toldo"])
def test_plain_text_passes(text: str) -> None:
    assert found(text) == []


def test_comments_of_several_lines_are_one_text() -> None:
    assert list(comments("x = 1  # a\n# b\n\n# c\n")) == [(1, "a\nb"), (4, "c")]
