"""All cases of the equivalence suite, the frozen file, and how both are compared."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import model_cases
import rest_cases
import solver_cases
import timeline_cases
from public_api import Service, answer
from small_networks import NETWORKS

FOLDER = Path(__file__).parent
FROZEN = FOLDER / "frozen.json"
DIFFERENCES = FOLDER / "differences.md"
WIDTH = 100
"""Columns of a line of the frozen file; what is shorter is one line."""

RELATIVE, ABSOLUTE = 1e-9, 1e-12
"""Tolerance of times and sizes, which are sums of a few numbers."""
RELATIVE_OF_MODELS = 1e-12
"""Tolerance of losses, norms and outputs; other kernels of torch change them by less than 1e-13."""

Case = Callable[[Service], dict[str, Any]]


def cases() -> dict[str, Case]:
    """Return every case by its name; the part before the slash is its kind."""
    found: dict[str, Case] = {}
    for name, content in solver_cases.UNIQUE.items():
        found[f"solve/{name}"] = partial(answer, content, is_unique=True)
    for name, content in solver_cases.OBJECTIVE.items():
        found[f"solve/{name}"] = partial(answer, content, is_unique=False)
    for name in timeline_cases.PLACED:
        found[f"timeline/{name}"] = partial(timeline_cases.shown, name)
    for name in NETWORKS:
        found[f"model/{name}"] = partial(model_cases.run, name)
    for name, response in rest_cases.RESPONSES.items():
        found[f"rest/{name}"] = response
    return found


def result(case: Case, service: Service) -> dict[str, Any]:
    """Run a case, and return its result as JSON has it."""
    found: dict[str, Any] = json.loads(json.dumps(case(service)))
    return found


def differences(frozen: Any, now: Any, relative: float, where: str = "") -> Iterator[str]:
    """Yield where two results differ, each as a path with both values.

    Args:
        frozen: what the case gave when it was frozen.
        now: what it gives now.
        relative: the tolerance of numbers.
        where: the path of both.
    """
    if isinstance(frozen, dict) and isinstance(now, dict):
        for key in sorted({*frozen, *now}):
            here = f"{where}/{key}"
            if key not in now:
                yield f"{here}: gone; it was {_short(frozen[key])}"
            elif key not in frozen:
                yield f"{here}: new; it is {_short(now[key])}"
            else:
                yield from differences(frozen[key], now[key], relative, here)
    elif isinstance(frozen, list) and isinstance(now, list) and len(frozen) == len(now):
        for index, (one, other) in enumerate(zip(frozen, now, strict=True)):
            yield from differences(one, other, relative, f"{where}/{index}")
    elif not _are_equal(frozen, now, relative):
        yield f"{where}: {_short(frozen)} became {_short(now)}"


def _are_equal(one: Any, other: Any, relative: float) -> bool:
    are_numbers = {type(one), type(other)} <= {int, float}  # bool is neither
    if are_numbers:
        return math.isclose(one, other, rel_tol=relative, abs_tol=ABSOLUTE)
    return type(one) is type(other) and bool(one == other)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def compared(name: str, frozen: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return where the result of a case differs from the frozen one."""
    is_model = name.startswith("model/")
    return list(differences(frozen, now, RELATIVE_OF_MODELS if is_model else RELATIVE))


def digest(frozen: dict[str, Any]) -> str:
    """Return a short hash of a frozen result."""
    return hashlib.sha256(json.dumps(frozen, sort_keys=True).encode()).hexdigest()[:12]


def read_frozen() -> dict[str, dict[str, Any]]:
    """Return the frozen cases: the result of each, and the digest of its first result."""
    found: dict[str, dict[str, Any]] = json.loads(FROZEN.read_text())
    return found


def write_frozen(content: dict[str, dict[str, Any]]) -> None:
    """Write the frozen cases with sorted keys, in lines that can be compared."""
    FROZEN.write_text(_pretty(content) + "\n")


def _pretty(value: Any, depth: int = 0) -> str:
    """Return JSON in which a list or object is one line where it is short."""
    text = json.dumps(value, sort_keys=True)
    if not isinstance(value, dict | list) or len(text) + depth <= WIDTH:
        return text
    pad = " " * (depth + 1)
    if isinstance(value, dict):
        rows = [
            f"{pad}{json.dumps(key)}: {_pretty(value[key], depth + 1)}" for key in sorted(value)
        ]
    else:
        rows = [pad + _pretty(item, depth + 1) for item in value]
    one, other = "{}" if isinstance(value, dict) else "[]"
    return f"{one}\n" + ",\n".join(rows) + f"\n{' ' * depth}{other}"


def listed_differences() -> list[str]:
    """Return the cases that the table of intended differences names."""
    rows = re.findall(r"^\| `([^`]+)` \|", DIFFERENCES.read_text(), re.MULTILINE)
    return list(rows)
