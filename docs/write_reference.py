"""Write the generated sections of the reference: ``python docs/write_reference.py``.

    docs/reference/rest.md        every endpoint, from the service's OpenAPI document
    docs/reference/settings.md    every setting, from the docstring and the fields of ``Settings``
    docs/reference/renames.md     the renamed fields of JSON, from the reader of older versions

A section lies between ``<!-- generated -->`` and ``<!-- end generated -->``. A test compares the
sections with what this program writes.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from placer.schema.versions import RENAMED
from placer_server.app import create_app
from placer_server.settings import Settings

FOLDER = Path(__file__).parent / "reference"
BEGIN, END = "<!-- generated -->", "<!-- end generated -->"
MACHINE_DEPENDENT = {
    "database": "`placements.db` in the user's state folder",
    "workers": "half of the cores",
    "max_solver_workers": "8, or the number of cores if that is more",
    "profile_memory_bytes": "half of the machine's memory",
    "node_name": "the host name",
}
"""Defaults that differ from machine to machine, in words."""


def main() -> int:
    """Write the sections; return the exit code."""
    for page, section in SECTIONS.items():
        path = FOLDER / page
        path.write_text(with_section(path.read_text(), section()))
    return 0


def with_section(page: str, section: str) -> str:
    """Return a page with its generated section replaced.

    Args:
        page: The page, which has both marks.
        section: The new text between the marks.
    """
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{section.strip()}\n{END}{after}"


def endpoints() -> str:
    """Return the section about every endpoint, in the order of the OpenAPI document."""
    paths = create_app(Settings(database=":memory:")).openapi()["paths"]
    parts = [
        "\n".join(_endpoint(f"{method.upper()} {path}", operation))
        for path, methods in paths.items()
        for method, operation in methods.items()
    ]
    return "\n\n".join(parts)


def _endpoint(title: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"### `{title}`"
    yield ""
    # OpenAPI descriptions are CommonMark, but descriptions from docstrings
    # keep double backticks.
    yield operation.get("description", "").replace("``", "`")
    if parameters := operation.get("parameters", []):
        yield ""
        yield "| parameter | in | default | meaning |"
        yield "| --- | --- | --- | --- |"
        yield from map(_parameter, parameters)
    if body := operation.get("requestBody"):
        yield ""
        yield f"Body: {_model(body['content'])}."
    yield ""
    yield f"Answers: {', '.join(_answer(*item) for item in operation['responses'].items())}."


def _parameter(parameter: Mapping[str, Any]) -> str:
    default = parameter["schema"].get("default")
    shown = "" if default in (None, "", []) else f"`{default}`"
    meaning = parameter.get("description") or _allowed(parameter["schema"])
    return f"| `{parameter['name']}` | {parameter['in']} | {shown} | {meaning} |"


def _allowed(schema: Mapping[str, Any]) -> str:
    """Return the values that a parameter may have, if they are listed."""
    options = [schema, *schema.get("anyOf", [])]
    values = [value for option in options for value in option.get("enum", [])]
    return ", ".join(f"`{value}`" for value in values)


def _answer(status: str, response: Mapping[str, Any]) -> str:
    content = response.get("content", {})
    if "application/problem+json" in content:
        return f"{status} (problem)"
    model = _model(content)
    return f"{status} {model}".strip()


def _model(content: Mapping[str, Any]) -> str:
    """Return the names of the models in a body or an answer."""
    found = re.findall(r"#/components/schemas/(\w+)", str(content))
    return " or ".join(f"`{name}`" for name in dict.fromkeys(found))


def settings() -> str:
    """Return the table of every setting, with its environment variable and its default."""
    lines = ["| variable | default | meaning |", "| --- | --- | --- |"]
    meanings = _attributes(inspect.getdoc(Settings) or "")
    for name, field in Settings.model_fields.items():
        default = MACHINE_DEPENDENT.get(name) or _default(field.get_default())
        lines.append(f"| `PLACER_{name.upper()}` | {default} | {meanings[name]} |")
    return "\n".join(lines)


def _default(value: Any) -> str:
    return f"`{value}`" if str(value).strip("*") else ""


def _attributes(docstring: str) -> dict[str, str]:
    """Return by attribute its text in a docstring's section ``Attributes``."""
    section = docstring.partition("Attributes:")[2]
    found = re.findall(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", section, re.MULTILINE | re.DOTALL)
    return {name: " ".join(text.split()).replace("``", "`") for name, text in found}


def renamed_fields() -> str:
    """Return the table of every field and value that version 2 of the wire types renamed."""
    lines = ["| type | version 1 | version 2 |", "| --- | --- | --- |"]
    for kind, renames in sorted(RENAMED["1"].items()):
        words = {field: dict(values) for field, values in renames.values.items()}
        for before, now in renames.fields.items():
            lines.append(f"| `{kind}` | `{before}` | `{now}`{_new_words(words.pop(now, {}))} |")
        for field, values in words.items():
            lines.append(f"| `{kind}` | `{field}` | `{field}`{_new_words(values)} |")
    return "\n".join(lines)


def _new_words(values: Mapping[str, str]) -> str:
    changes = (f"`{before}` is now `{now}`" for before, now in values.items())
    return f": {', '.join(changes)}" if values else ""


SECTIONS: Mapping[str, Callable[[], str]] = {
    "rest.md": endpoints,
    "settings.md": settings,
    "renames.md": renamed_fields,
}
"""By page, what makes its section."""

if __name__ == "__main__":
    sys.exit(main())
