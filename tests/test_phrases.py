"""Tests that texts avoid the phrases of phrases_to_avoid.txt."""

import ast
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
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


@cache
def phrases() -> list[tuple[re.Pattern[str], str]]:
    """Return each phrase to avoid and its replacement."""
    lines = [line for line in LIST.read_text().splitlines() if line and not line.startswith("#")]
    pairs = [re.split(r"\s+-> ", line, maxsplit=1) for line in lines]
    return [(re.compile(phrase.replace(" ", r"\s+"), re.I), text) for phrase, text in pairs]


def is_text(node: ast.AST) -> bool:
    """Return whether a node is a string, also one with values in it."""
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def comments(source: str, nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each block of comments, without the signs.

    Args:
        source: of a module.
        nodes: of its syntax tree; a comment begins at a sign outside its strings. Reading tokens
            instead takes three times as long as parsing.
    """
    spans: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for node in filter(is_text, nodes):
        first, last = node.lineno, node.end_lineno  # type: ignore[attr-defined]
        for line in range(first, last + 1):
            begin = node.col_offset if line == first else 0  # type: ignore[attr-defined]
            end = node.end_col_offset if line == last else math.inf  # type: ignore[attr-defined]
            spans[line].append((begin, end))
    block: list[str] = []
    first_line = last_line = 0
    for number, line in enumerate(source.encode().split(b"\n"), 1):
        signs = (sign.start() for sign in re.finditer(b"#", line))
        inside = spans.get(number, ())
        begin = next((at for at in signs if not any(a <= at < b for a, b in inside)), None)
        if begin is None:
            continue
        if block and number != last_line + 1:
            yield first_line, "\n".join(block)
            block = []
        if not block:
            first_line = number
        block.append(line[begin:].decode().lstrip("# "))
        last_line = number
    if block:
        yield first_line, "\n".join(block)


def strings(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring, message and other string of several words."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def texts() -> Iterator[tuple[Path, int, str]]:
    """Yield every text for readers, with its file and first line."""
    for folder in PROGRAMS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            source = path.read_text()
            nodes = [*ast.walk(ast.parse(source))]
            for line, text in (*comments(source, nodes), *strings(nodes)):
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
    source = "x = 1  # a\n# b\n\n# c\n"
    assert list(comments(source, ast.walk(ast.parse(source)))) == [(1, "a\nb"), (4, "c")]


def test_a_sign_inside_a_string_begins_no_comment() -> None:
    source = 'x = \'ä#\', f\'#{a}\', """#\n# b\n#"""  # c\n'
    assert list(comments(source, ast.walk(ast.parse(source)))) == [(3, "c")]
