"""The files that describe the project: metadata, workflows, templates."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"


def project() -> dict[str, Any]:
    """Return the table ``project`` of pyproject.toml."""
    tables: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return tables


def parsed(path: Path) -> Any:
    """Return the content of a YAML file."""
    return yaml.safe_load(path.read_text())


def workflow(path: Path) -> dict[str, Any]:
    """Return a workflow with its triggers under ``"on"``, which YAML 1.1 reads as the truth value
    ``True``."""
    content: dict[Any, Any] = parsed(path)
    content["on"] = content.pop(True)
    return content
