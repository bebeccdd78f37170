"""A function mode that also sees custom autograd functions and checkpoints.

torch's own TorchFunctionMode misses two things: the arguments of ``autograd.Function.apply``, and
functions that ``torch.utils.checkpoint`` runs again in the backward pass.
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


class ExtendedFunctionMode(TorchFunctionMode):
    """A mode for functions of torch, arguments of custom functions, and checkpoints."""

    def custom_function_arguments(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return what a custom function receives instead of these arguments.

        Args:
            args: the positional arguments.
        """
        raise NotImplementedError

    def recomputed_function(self, function: Function) -> Function:
        """Return what a checkpoint runs again in the backward pass instead of this function.

        Args:
            function: what the checkpoint ran in the forward pass.
        """
        raise NotImplementedError

    @property
    def is_active(self) -> bool:
        """Return whether the calls of this thread pass through this mode."""
        return self in _get_current_function_mode_stack()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Any:
        _replacements.begin()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _replacements.end()


def _innermost_mode() -> ExtendedFunctionMode | None:
    """Return the innermost of these modes in this thread; None while torch.compile traces."""
    if torch.compiler.is_dynamo_compiling():
        return None
    modes = reversed(_get_current_function_mode_stack())  # type: ignore[no-untyped-call]
    return next((mode for mode in modes if isinstance(mode, ExtendedFunctionMode)), None)


class _Replacements:
    """Functions inside torch that are replaced while any thread has such a mode.

    In threads without the mode, the replacements do what torch's functions do.
    ``autograd.Function.apply`` calls ``unwrap_dead_wrappers`` on its arguments first. ``apply``
    itself cannot be replaced, because user code may hold it under another name: ``product =
    Product.apply``.
    """

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0
        self._undo: list[Callable[[], None]] = []

    def begin(self) -> None:
        with self._lock:
            self._count += 1
            if self._count == 1:
                # For custom functions; the others are for checkpoints, non-reentrant and reentrant.
                self._replace(functorch, "unwrap_dead_wrappers", _replace_unwrapping)
                self._replace(
                    checkpoint, "_checkpoint_without_reentrant_generator", _replace_checkpoint
                )
                self._replace(checkpoint.CheckpointFunction, "apply", _replace_checkpoint)

    def end(self) -> None:
        with self._lock:
            self._count -= 1
            while self._undo and not self._count:
                self._undo.pop()()

    def _replace(self, owner: Any, name: str, instead: Callable[[Function], Function]) -> None:
        was, is_own = getattr(owner, name), name in vars(owner)
        # A name that the class only inherits is deleted again, not set.
        self._undo.append(lambda: setattr(owner, name, was) if is_own else delattr(owner, name))
        setattr(owner, name, instead(was))


def _replace_unwrapping(was: Function) -> Function:
    def unwrap(args: tuple[Any, ...]) -> Any:
        mode = _innermost_mode()
        return was(args if mode is None else mode.custom_function_arguments(args))

    return unwrap


def _replace_checkpoint(was: Function) -> Function:
    def keep(function: Function, *args: Any, **kwargs: Any) -> Any:
        mode = _innermost_mode()
        return was(
            function if mode is None else mode.recomputed_function(function), *args, **kwargs
        )

    return keep


_replacements = _Replacements()
