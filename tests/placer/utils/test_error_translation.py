from __future__ import annotations

import gc
import weakref

import pytest

from placer import InputError, PlacerError
from placer.utils.error_translation import ErrorTranslation


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
            # the traceback of the cause has it as long as the error is looked at
            assert made[0]() is not None
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
