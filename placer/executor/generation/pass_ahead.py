"""The pass of the next token, issued before the host knows whether the text goes on.

    without   host     issue 1 ────────── wait for token 1, stop? ── issue 2 ───────── wait ...
              device   pass 1 ──────────── token 1 ......idle....... pass 2 ──────────── token 2
    with      host     issue 1 ── issue 2 ── wait for token 1, stop? ── issue 3 ── wait ...
              device   pass 1 ──────────── token 1 ── pass 2 ──────────── token 2 ── pass 3

``generate`` of transformers draws a token, asks its stopping criteria, and waits for their answer.
A criterion of this module never stops a text, but knows the new token, which is still on the device
only. It prepares the arguments of the next pass by the model's own methods, and issues the pass in
streams of its own. When the loop asks for these arguments and then calls the model with them, it
gets what is there already. Identity of all arguments says that the call is the expected one. A pass
that nobody asks for is taken back: the cache has one token less again.

Loops that do more between two passes, such as beam search, do not ask for these arguments, which
the first tokens of each text show. So their passes are not issued ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from placer.executor.generation.recording import ReplayedCall

PREPARE = "prepare_inputs_for_generation"
"""The method of models that turns the tokens of a text into arguments of the next pass."""

UPDATE = "_update_model_kwargs_for_generation"
"""The method of models that adds a pass to the arguments that ``PREPARE`` takes."""

_PLAIN = (bool, int, float, str, type(None))


@dataclass
class _Expected:
    """A pass that was issued ahead.

    Attributes:
        ids: the text so far, which ``PREPARE`` is expected to be given.
        given: the further arguments that it is expected to be given.
        inputs: what it returned.
        kwargs: the arguments of the expected call.
        call: the pass.
    """

    ids: Tensor
    given: dict[str, Any]
    inputs: dict[str, Any]
    kwargs: dict[str, Any]
    call: ReplayedCall


class PassAhead:
    """The passes ahead of one text or several that a call of ``generate`` makes.

    An instance is a stopping criterion of transformers.

    Args:
        issue: issues the pass with these keyword arguments; returns None if there is no recording
            for it.
        take_back: undoes a pass that was issued.
    """

    def __init__(
        self,
        issue: Callable[[dict[str, Any]], ReplayedCall | None],
        take_back: Callable[[ReplayedCall], None],
    ) -> None:
        self._issue = issue
        self._take_back = take_back
        self._expected: _Expected | None = None
        # what the loop did lately: the text that criteria saw, the arguments after the latest
        # pass, what ``PREPARE`` and the model get besides, and whether it is as expected here
        self._seen: Tensor | None = None
        self._updated: dict[str, Any] | None = None
        self._besides: dict[str, Any] = {}
        self._inputs: dict[str, Any] = {}
        self._call_besides: dict[str, Any] = {}
        self._is_known = False
        self._prepare: Callable[..., Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> PassAhead:
        """Return this object, which belongs to one call of ``generate``."""
        return self

    def note_update(self, updated: dict[str, Any]) -> None:
        """Note the arguments that ``PREPARE`` will be given, besides the text.

        Args:
            updated: what ``UPDATE`` returned.
        """
        self._updated = updated

    def prepared(
        self, prepare: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any]
    ) -> Any:
        """Return the arguments of the next pass, as ``PREPARE`` does.

        Args:
            prepare: the model's own method.
            args: its positional arguments.
            given: its keyword arguments.
        """
        expected, updated = self._expected, self._updated or {}
        ids = args[0] if len(args) == 1 else None
        if expected is not None and ids is expected.ids and _is_same(given, expected.given):
            return expected.inputs
        self.discard()
        self._besides = {name: value for name, value in given.items() if name not in updated}
        self._is_known = ids is self._seen and _is_same(given, {**updated, **self._besides})
        self._prepare = prepare
        self._inputs = prepare(*args, **given)
        return self._inputs

    def taken(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ReplayedCall | None:
        """Return the pass with these arguments; None unless it was issued ahead.

        Args:
            args: positional arguments of a call of the model.
            kwargs: keyword arguments.
        """
        expected, self._expected = self._expected, None
        if expected is None:
            return None
        if args or not _is_same(kwargs, expected.kwargs):
            self._take_back(expected.call)
            return None
        self._inputs = expected.inputs
        return expected.call

    def note_call(self, kwargs: Mapping[str, Any]) -> None:
        """Note the arguments of a call that replayed a recording.

        Args:
            kwargs: keyword arguments.
        """
        self._call_besides = {
            name: value for name, value in kwargs.items() if self._inputs.get(name) is not value
        }

    def forget(self) -> None:
        """Note that a call did not replay a recording: the next pass is not issued ahead."""
        self._is_known = False

    def discard(self) -> None:
        """Take back the pass that was issued ahead, if any."""
        expected, self._expected = self._expected, None
        if expected is not None:
            self._take_back(expected.call)

    def __call__(self, ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Issue the next pass; stop no text.

        Args:
            ids: the texts so far, of shape (texts, tokens).
            scores: of the loop; not used.
            kwargs: of the loop; not used.

        Returns:
            False for each text.
        """
        self._seen = ids
        if self._is_known and self._updated is not None and self._prepare is not None:
            self.discard()
            given = {**self._besides, **self._updated}
            inputs = self._prepare(ids, **given)
            full = {**inputs, **self._call_besides}
            call = self._issue(full)
            if call is not None:
                self._expected = _Expected(ids, given, inputs, full, call)
        return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)


def fits(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of ``generate`` takes further stopping criteria, and asks them.

    Args:
        module: the model.
        args: positional arguments of the call.
        kwargs: keyword arguments.
    """
    own = getattr(type(module), "generate", None)
    return (
        getattr(own, "__module__", "") == "transformers.generation.utils"
        # the fourth are stopping criteria
        and len(args) < 4
        and isinstance(kwargs.get("stopping_criteria") or [], list)
        and kwargs.get("custom_generate") is None
        and kwargs.get("cache_implementation") != "paged"
        and all(callable(getattr(module, name, None)) for name in (PREPARE, UPDATE))
    )


def _is_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Return whether arguments are the same objects, or equal numbers and texts."""
    return found.keys() == expected.keys() and all(
        value is expected[name] or (isinstance(value, _PLAIN) and value == expected[name])
        for name, value in found.items()
    )
