"""Runs of a model's code with comparable results: no dropout, no batch statistics, equal draws.

    with evaluated(), draws.recorded():
        whole = model(batch)
    with evaluated(), draws.replayed():
        parts = [model(part) for part in halves(batch)]

The modules keep their modes, so that code which reads ``self.training`` takes the same branch as in
a real run. Only operations act as in evaluation mode. Later runs draw the same random numbers as
the first, or their slice of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from placer.capture.export.op_effects import operation_draws_random

_TRAINING_FLAGS: dict[str, bool | float] = {"training": False, "train": False, "dropout_p": 0.0}
"""Arguments that make an operation train, and their values in evaluation."""


@contextmanager
def operations_in_eval_mode() -> Iterator[None]:
    """Run operations inside as in evaluation mode, with exact float32 products (no TF32)."""
    with (
        _without_tf32(torch.backends.cuda.matmul),
        _without_tf32(torch.backends.cudnn),
        _EvalMode(),
    ):
        yield


@contextmanager
def _without_tf32(library: Any) -> Iterator[None]:
    """Forbid a CUDA library to use TF32 for float32 inside."""
    try:
        before = library.allow_tf32
        library.allow_tf32 = False
    except RuntimeError:
        # The user set torch's newer option, and torch refuses to mix both.
        yield
        return
    try:
        yield
    finally:
        library.allow_tf32 = before


class _EvalMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        for names in _overload_parameters(func):
            if not _fits_overload(names, args, kwargs):
                continue
            args = list(args)
            for name, value in _TRAINING_FLAGS.items():
                if name in kwargs:
                    kwargs[name] = value
                elif name in names and names.index(name) < len(args):
                    args[names.index(name)] = value
            if "running_mean" in names:
                _give_statistics(names, args, kwargs)
            break
        return func(*args, **kwargs)


def _fits_overload(names: tuple[str, ...], args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether arguments fit an overload with these names: its flags are booleans."""
    if len(args) > len(names):
        return False
    places = [names.index(name) for name in ("training", "train") if name in names]
    return all(place >= len(args) or isinstance(args[place], bool) for place in places)


def _give_statistics(names: tuple[str, ...], args: list[Any], kwargs: dict[str, Any]) -> None:
    """Give a batch normalisation without running statistics mean 0 and variance 1."""
    given = args[0] if args else kwargs[names[0]]
    for name, make in (("running_mean", torch.zeros), ("running_var", torch.ones)):
        place = names.index(name)
        has_place = place < len(args)
        if (args[place] if has_place else kwargs.get(name)) is None:
            value = make(given.shape[1], dtype=given.dtype, device=given.device)
            if has_place:
                args[place] = value
            else:
                kwargs[name] = value


@cache
def _overload_parameters(func: Any) -> tuple[tuple[str, ...], ...]:
    """Return the parameter names of an operation's overloads that have flags of training."""
    if isinstance(func, torch._ops.OpOverload):
        names = [_schema_names(func)]
    else:
        names = _python_names(func) or _names_of_builtin(func)
    return tuple(one for one in names if not _TRAINING_FLAGS.keys().isdisjoint(one))


def _python_names(func: Any) -> list[tuple[str, ...]]:
    """Return the parameter names of a Python function; none for others.

    Tensor.__pow__, for example, is a function that only wraps a builtin.
    """
    if not inspect.isfunction(func):
        return []
    try:
        return [tuple(inspect.signature(func).parameters)]
    except ValueError:
        return []


def _names_of_builtin(func: Any) -> list[tuple[str, ...]]:
    """Return the parameter names of the ATen operator with the name of a builtin.

    A builtin such as torch.dropout shows no signature.
    """
    packet: Any = getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
    is_packet = isinstance(packet, torch._ops.OpOverloadPacket)
    return [
        _schema_names(getattr(packet, overload))
        for overload in (packet.overloads() if is_packet else ())
    ]


def _schema_names(operation: torch._ops.OpOverload) -> tuple[str, ...]:
    return tuple(argument.name for argument in operation._schema.arguments)


class RandomNumbers:
    """The random numbers of a first run, for later runs.

    If a later run draws a tensor that is smaller along one dimension, it is taken to draw for a
    part of the samples. It receives the numbers of that part.
    """

    def __init__(self) -> None:
        self._drawn: list[Tensor] = []

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the numbers that are drawn inside."""
        self._drawn = []
        with _RandomMode(self._note):
            yield

    @contextmanager
    def replayed(self, start: int = 0, size: int = 1, total: int = 1) -> Iterator[None]:
        """Draw the recorded numbers inside.

        Args:
            start: number of samples before those that run; 0 by default.
            size: number of samples that run; 1 by default.
            total: number of samples in the first run; 1 by default.
        """
        left = iter(self._drawn)

        def give(made: Tensor) -> None:
            known = next(left, None)
            if known is not None:
                _copy_part(known, made, start, size, total)

        with _RandomMode(give):
            yield

    def _note(self, made: Tensor) -> None:
        self._drawn.append(made.detach().clone())


class _RandomMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, look: Callable[[Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._look = look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if operation_draws_random(func, args, kwargs or {}):
            for leaf in tree_leaves(made):
                if isinstance(leaf, Tensor):
                    self._look(leaf)
        return made


def _copy_part(known: Tensor, made: Tensor, start: int, size: int, total: int) -> None:
    """Overwrite a drawn tensor with the recorded one, or with its slice for these samples.

        recorded (8, 3), drawn (2, 3), start 4, size 2, total 8   ->   rows 4 and 5 of the recorded

    If the shapes differ in another way, the drawn numbers stay.
    """
    if known.dim() != made.dim() or known.dtype != made.dtype:
        return
    # At most one dimension may differ, in the proportion of the samples.
    unlike = [
        dim
        for dim, (one, other) in enumerate(zip(known.shape, made.shape, strict=True))
        if one != other
    ]
    if len(unlike) > 1 or (
        unlike and known.shape[unlike[0]] * size != made.shape[unlike[0]] * total
    ):
        return
    if unlike:
        each = known.shape[unlike[0]] // total
        known = known.narrow(unlike[0], start * each, size * each)
    made.copy_(known)
