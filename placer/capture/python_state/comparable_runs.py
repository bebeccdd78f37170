"""Runs of a model's code whose results can be compared: no dropout, no batch statistics, the same
random numbers.

    with evaluated(), draws.first():  whole = model(batch)
    with evaluated(), draws.again():  parts = [model(part) for part in halves(batch)]

The modules keep their modes, so that code which asks for ``self.training`` takes the same branch as
in a real run. The operations below act as in evaluation mode, and what is drawn at random is drawn
once: later runs get the same numbers, or their slice of them.
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

from placer.capture.export.op_effects import draws

_FLAGS: dict[str, bool | float] = {"training": False, "train": False, "dropout_p": 0.0}
"""Arguments that tell an operation to train, by name, and their values in evaluation."""


@contextmanager
def evaluated() -> Iterator[None]:
    """Let operations inside drop nothing and normalise by running statistics; float32 products are
    exact (no TF32).
    """
    with _exact(torch.backends.cuda.matmul), _exact(torch.backends.cudnn), _Evaluated():
        yield


@contextmanager
def _exact(library: Any) -> Iterator[None]:
    """Let a library of CUDA compute in float32 where it may use TF32."""
    try:
        before = library.allow_tf32
        library.allow_tf32 = False
    except RuntimeError:
        # set by torch's newer name for it, beside which this one is refused
        yield
        return
    try:
        yield
    finally:
        library.allow_tf32 = before


class _Evaluated(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        for names in _parameters(func):
            if not _fits(names, args, kwargs):
                continue
            args = list(args)
            for name, value in _FLAGS.items():
                if name in kwargs:
                    kwargs[name] = value
                elif name in names and names.index(name) < len(args):
                    args[names.index(name)] = value
            if "running_mean" in names:
                _give_statistics(names, args, kwargs)
            break
        return func(*args, **kwargs)


def _fits(names: tuple[str, ...], args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether arguments may be those of an overload with these names: its flags are flags."""
    if len(args) > len(names):
        return False
    places = [names.index(name) for name in ("training", "train") if name in names]
    return all(place >= len(args) or isinstance(args[place], bool) for place in places)


def _give_statistics(names: tuple[str, ...], args: list[Any], kwargs: dict[str, Any]) -> None:
    """Give a batch normalisation without running statistics the mean 0 and the variance 1."""
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
def _parameters(func: Any) -> tuple[tuple[str, ...], ...]:
    """Return the names of an operation's parameters, by overload, where it has flags of training;
    else nothing.
    """
    if isinstance(func, torch._ops.OpOverload):
        names = [_names(func)]
    elif inspect.isfunction(func):
        names = [tuple(inspect.signature(func).parameters)]
    else:
        packet: Any = getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
        is_packet = isinstance(packet, torch._ops.OpOverloadPacket)
        names = [
            _names(getattr(packet, overload))
            for overload in (packet.overloads() if is_packet else ())
        ]
    return tuple(one for one in names if not _FLAGS.keys().isdisjoint(one))


def _names(operation: torch._ops.OpOverload) -> tuple[str, ...]:
    return tuple(argument.name for argument in operation._schema.arguments)


class Draws:
    """The random numbers of a run, for others that are to have the same.

    A tensor that a later run draws in another size along one dimension is taken for the same
    numbers of a part of the
    samples: it has those of the next part.
    """

    def __init__(self) -> None:
        self._drawn: list[Tensor] = []

    @contextmanager
    def first(self) -> Iterator[None]:
        """Note what is drawn inside."""
        self._drawn = []
        with _Drawing(self._note):
            yield

    @contextmanager
    def again(self, start: int = 0, size: int = 1, total: int = 1) -> Iterator[None]:
        """Draw the same numbers inside.

        Args:
            start: number of samples before those that run.
            size: number of samples that run.
            total: number of samples in the first run.
        """
        left = iter(self._drawn)

        def give(made: Tensor) -> None:
            known = next(left, None)
            if known is not None:
                _copy_part(known, made, start, size, total)

        with _Drawing(give):
            yield

    def _note(self, made: Tensor) -> None:
        self._drawn.append(made.detach().clone())


class _Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, look: Callable[[Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._look = look

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if draws(func, args, kwargs or {}):
            for leaf in tree_leaves(made):
                if isinstance(leaf, Tensor):
                    self._look(leaf)
        return made


def _copy_part(known: Tensor, made: Tensor, start: int, size: int, total: int) -> None:
    """Write the numbers that were drawn before into a tensor that was drawn now, as far as they are
    the same.
    """
    if known.dim() != made.dim() or known.dtype != made.dtype:
        return
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
