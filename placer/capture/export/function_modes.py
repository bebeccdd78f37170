"""A function mode that sees more than torch's: what custom functions are given and what checkpoints
will run again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import utils as functorch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import checkpoint

Function = Callable[..., Any]


class WideMode(TorchFunctionMode):
    """Functions of torch pass by here, as by any mode, and two things that are none of these."""

    def given(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """What a custom function takes instead of this."""
        raise NotImplementedError

    def kept(self, function: Function) -> Function:
        """What a checkpoint runs in the backward pass instead of the function that it ran before."""
        raise NotImplementedError

    @property
    def is_here(self) -> bool:
        """Whether what this thread calls passes by here."""
        return self in _get_current_function_mode_stack()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Any:
        _replacements.begin()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _replacements.end()


def _latest() -> WideMode | None:
    """The mode that what this thread calls passes by first; none while a graph is made."""
    if torch.compiler.is_dynamo_compiling():
        return None
    modes = reversed(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]
    return next((mode for mode in modes if isinstance(mode, WideMode)), None)


class _Replacements:
    """Functions inside torch that are others while any thread has such a mode; in other threads
    they do what they did.

    What ``apply`` of custom functions calls first on its arguments is one (``apply`` itself may be
    known by other
    names: ``product = Product.apply``), what ``checkpoint`` hands its function to are the others.
    """

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0
        self._undo: list[Callable[[], None]] = []

    def begin(self) -> None:
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._replace(functorch, "unwrap_dead_wrappers", _instead_of_unwrapping)
                self._replace(
                    checkpoint, "_checkpoint_without_reentrant_generator", _instead_of_keeping
                )
                self._replace(checkpoint.CheckpointFunction, "apply", _instead_of_keeping)

    def end(self) -> None:
        with self._lock:
            self._count -= 1
            while self._undo and not self._count:
                self._undo.pop()()

    def _replace(self, owner: Any, name: str, instead: Callable[[Function], Function]) -> None:
        was, is_own = getattr(owner, name), name in vars(owner)
        self._undo.append(lambda: setattr(owner, name, was) if is_own else delattr(owner, name))
        setattr(owner, name, instead(was))


def _instead_of_unwrapping(was: Function) -> Function:
    def unwrap(args: tuple[Any, ...]) -> Any:
        mode = _latest()
        return was(args if mode is None else mode.given(args))

    return unwrap


def _instead_of_keeping(was: Function) -> Function:
    def keep(function: Function, *args: Any, **kwargs: Any) -> Any:
        mode = _latest()
        return was(function if mode is None else mode.kept(function), *args, **kwargs)

    return keep


_replacements = _Replacements()
