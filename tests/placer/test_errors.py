from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest
from torch import nn

import placer
from placer import errors
from placer.errors import ErrorTranslation, InputError, PlacerError, kind_of


@pytest.mark.parametrize(
    ("given", "told"), [(1, "an int"), (None, "None"), (nn.Linear(1, 1), "a Linear"), ([], "a list")]
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
    code = f"import sys; sys.modules['torch'] = None; from placer import {names}; print(StageError.__module__)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "placer.errors"


class _Large:
    """A tensor, say, in a call that fails."""


def _failing(made: list[weakref.ref[_Large]]) -> None:
    large = _Large()
    made.append(weakref.ref(large))
    raise KeyError("inside")


def _translated(error: BaseException) -> BaseException:
    other = InputError("outside")
    other.__cause__ = error
    return other


def test_a_translated_error_has_its_cause_and_is_kept_by_nothing() -> None:
    # A generator under contextlib.contextmanager kept it in a cycle, on Python 3.12 and later.
    made: list[weakref.ref[_Large]] = []
    gc.disable()
    try:
        try:
            with ErrorTranslation(_translated):
                _failing(made)
        except PlacerError as error:
            assert isinstance(error.__cause__, KeyError) and error.__context__ is error.__cause__
            assert made[0]() is not None  # the traceback of the cause has it as long as the error is looked at
        assert made[0]() is None
    finally:
        gc.enable()


def test_an_error_that_is_not_translated_goes_on_as_it_is() -> None:
    made: list[weakref.ref[_Large]] = []
    with pytest.raises(KeyError) as told, ErrorTranslation(lambda error: error):
        _failing(made)
    assert [entry.name for entry in told.traceback][-1] == "_failing"
    assert told.value.__cause__ is None
    with ErrorTranslation(_translated):
        pass
