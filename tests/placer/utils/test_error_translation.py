from __future__ import annotations

import gc
import weakref

import pytest

from placer import InputError, PlacerError
from placer.utils.error_translation import ErrorTranslation, reason


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


def _lazily_imported() -> None:
    try:
        try:
            raise RuntimeError("operator torchvision::nms does not exist.\nA second line.")
        except RuntimeError as error:
            raise ImportError("torchvision cannot be used") from error
    except ImportError:
        # as a module's __getattr__ does, without ``from``
        raise ModuleNotFoundError("Could not import module 'LlamaConfig'.")  # noqa: B904


def test_the_reason_of_a_lazy_import_is_the_first_error_of_the_chain() -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        _lazily_imported()
    assert reason(caught.value) == (
        "Could not import module 'LlamaConfig'"
        " (RuntimeError: operator torchvision::nms does not exist)"
    )


def test_the_reason_of_an_error_without_another_cause_is_its_first_line() -> None:
    repeated = ValueError("cannot connect: refused")
    repeated.__cause__ = OSError("refused")
    hidden = ValueError("no such name")
    hidden.__context__, hidden.__suppress_context__ = KeyError("name"), True
    found = [reason(error) for error in (repeated, hidden, ValueError("one.\ntwo"), ValueError())]
    assert found == ["cannot connect: refused", "no such name", "one", "ValueError"]
