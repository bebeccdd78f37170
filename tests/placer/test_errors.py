from __future__ import annotations

import subprocess
import sys

import pytest
from torch import nn

import placer
from placer import errors
from placer.errors import kind_of


@pytest.mark.parametrize(
    ("given", "told"),
    [(1, "an int"), (None, "None"), (nn.Linear(1, 1), "a Linear"), ([], "a list")],
)
def test_a_value_is_told_by_its_kind(given: object, told: str) -> None:
    assert kind_of(given) == told


def _every_error() -> list[type[Exception]]:
    """PlacerError and its subclasses in ``placer.errors``, found through inheritance."""
    found = [errors.PlacerError]
    for kind in found:
        found += [other for other in kind.__subclasses__() if other not in found]
    return [kind for kind in found if kind.__module__ == "placer.errors"]


@pytest.mark.parametrize("kind", _every_error(), ids=lambda kind: str(kind.__name__))
def test_an_error_can_be_imported_from_placer(kind: type[Exception]) -> None:
    name = kind.__name__
    assert getattr(placer, name) is kind
    assert name in placer.__all__
    assert name in dir(placer)
    assert name in errors.__all__


def test_the_errors_can_be_imported_where_torch_is_not_installed() -> None:
    names = ", ".join(kind.__name__ for kind in _every_error())
    code = "import sys; sys.modules['torch'] = None; "
    code += f"from placer import {names}; print(StageError.__module__)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "placer.errors"
