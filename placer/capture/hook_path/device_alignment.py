"""Running a model that cannot be captured: modules on their devices, functional operations aligned
between them.

A module that has a device gets its inputs moved there. An operation between modules whose tensors
are on several devices runs where its parameters are, else where the latest module ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode

from placer import devices
from placer.capture.export.function_modes import Function, WideMode
from placer.capture.hook_path.packed_sequences import lengths_of
from placer.capture.python_state.mutable_inputs import Exchange
from placer.capture.pytrees import CONSTANTS, flatten

_KEEPS_ITS_PLACE = {
    "to",
    "cpu",
    "cuda",
    "__get__",
    "__set__",
    "backward",
    "grad",
    "set_",
    "requires_grad_",
    "register_hook",
}

_OF_LISTS = "_foreach_"
"""How names begin of what takes lists, whose tensors are each with their own of the other lists,
not all together."""

_OF_GROUPS = ("_fused_", "_amp_foreach_")
"""The same, where the caller has sorted them by device: several of the lists are written to."""

_FUNCTIONS = (FunctionType, MethodType, partial)

_AT_A_GLANCE = frozenset({*CONSTANTS, type(...)})
"""What holds no tensor."""

_WRITES = {
    "__setitem__",
    *(
        f"__i{name}__"
        for name in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split()
    ),
}
"""What writes to its first argument, beside what is named so: ``add_``."""

Observer = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
"""Called after every function with (function, args, kwargs, result)."""

Renewal = Callable[[], AbstractContextManager["Alignment"]]
"""What is entered where a backward pass runs something again: in it operations are aligned."""


class Alignment(WideMode):
    """Moves the tensors of one operation to one device.

    Args:
        observer: sees every function.
        renewal: where operations are to be aligned too that a checkpoint runs again in the backward
            pass.

    Attributes:
        place: the device of the latest module; None before the first.
    """

    def __init__(self, observer: Observer | None = None, renewal: Renewal | None = None) -> None:
        super().__init__()
        self.place: torch.device | None = None
        self._observer = observer
        self._renewal = renewal
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """In it operations are not aligned; where no other mode was entered since, they do not pass
        by here at all.
        """
        is_latest = _get_current_function_mode() is self  # type: ignore[no-untyped-call]
        was, self._is_paused = self._is_paused, True
        if is_latest:
            self.__exit__(None, None, None)
        try:
            yield
        finally:
            if is_latest:
                self.__enter__()
            self._is_paused = was

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """In it, inside ``paused`` or where another thread entered this, they are."""
        is_away = not self.is_here
        was, self._is_paused = self._is_paused, False
        if is_away:
            self.__enter__()
        try:
            yield
        finally:
            if is_away:
                self.__exit__(None, None, None)
            self._is_paused = was

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # What is compiled, a branch of torch.cond, say, is given what is aligned.
        if self._is_paused or torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name.startswith(_OF_LISTS):
            args, kwargs = _beside_the_first(args, kwargs)
        elif name not in _KEEPS_ITS_PLACE and not name.startswith(_OF_GROUPS):
            args, kwargs = self._aligned(name, args, kwargs)
        result = func(*args, **kwargs)
        if self._observer is not None:
            self._observer(func, args, kwargs, result)
        return result

    def given(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """What a custom function is given, all of it on one device: it may keep it for its backward
        pass.

        What is given a function is a checkpoint of somebody's own, and what that runs is aligned
        when it runs.
        """
        if self._is_paused:
            return args
        if any(isinstance(one, _FUNCTIONS) for one in args):
            return tuple(self.kept(one) if isinstance(one, _FUNCTIONS) else one for one in args)
        aligned: tuple[Any, ...] = self._aligned("", args, {})[0]
        return aligned

    def kept(self, function: Function) -> Function:
        """The function as a checkpoint runs it again: aligned, and on the same devices, so that it
        does the same.
        """
        renewal, place = self._renewal, self.place
        if renewal is None or self._is_paused:
            return function

        def again(*args: Any, **kwargs: Any) -> Any:
            # the pass before, which a reentrant checkpoint begins with this, too
            if self.is_here:
                return function(*args, **kwargs)
            with devices.answering(), renewal() as alignment, alignment.resumed():
                latest, alignment.place = alignment.place, place
                try:
                    return function(*args, **kwargs)
                finally:
                    alignment.place = latest

        return again

    def _aligned(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        position = lengths_of(name, args)
        if position is not None:
            lengths = devices.move(args[position], devices.HOST)
            rest, kwargs = self._aligned("", (*args[:position], *args[position + 1 :]), kwargs)
            return (*rest[:position], lengths, *rest[position:]), kwargs
        if _are_together(args, kwargs):
            return args, kwargs
        tensors, structure = flatten((args, kwargs))
        tensors = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
        places = [devices.location(tensor) for tensor in tensors]
        if all(devices.same(place, places[0]) for place in places):
            return args, kwargs
        written, _ = flatten(_written_beside(name, args, kwargs))
        target = devices.location(written[0]) if written else self._target(name, tensors, places)
        moved = [
            tensor
            if tensor.dim() == 0 and devices.same(place, devices.HOST)
            else devices.move(tensor, target)
            for tensor, place in zip(tensors, places, strict=True)
        ]
        aligned: tuple[Any, Any] = structure.unflatten(moved)
        return aligned

    def _target(self, name: str, tensors: list[Tensor], places: list[torch.device]) -> torch.device:
        if name in _WRITES or (name.endswith("_") and not name.endswith("__")):
            return places[0]
        owners = [
            place
            for tensor, place in zip(tensors, places, strict=True)
            if isinstance(tensor, nn.Parameter)
        ]
        if owners:
            return owners[0]
        if self.place is not None and any(devices.same(place, self.place) for place in places):
            return self.place
        return next(
            (place for tensor, place in zip(tensors, places, strict=True) if tensor.dim()),
            places[0],
        )


def _written_beside(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operation writes to, where that is not what its name says."""
    if name in ("batch_norm", "instance_norm"):
        return kwargs.get("running_mean", args[1:2])
    return kwargs.get("out")


def _beside_the_first(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Lists of tensors, each tensor where the one at its place in the first list is."""
    first = next(nest for nest in (*args, *kwargs.values()) if isinstance(nest, (list, tuple)))
    places = [devices.location(tensor) for tensor in first]

    def beside(nest: Any) -> Any:
        if not isinstance(nest, (list, tuple)) or len(nest) != len(places):
            return nest
        return [
            devices.move(item, place) if isinstance(item, Tensor) else item
            for item, place in zip(nest, places, strict=True)
        ]

    return tuple(map(beside, args)), {name: beside(nest) for name, nest in kwargs.items()}


def _are_together(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it is seen at a glance, as of most operations, that all tensors are on one device."""
    place: torch.device | None = None
    for one in (*args, *kwargs.values()):
        for item in one if type(one) in (list, tuple) else (one,):
            if isinstance(item, Tensor):
                here = devices.location(item)
                place = place or here
                if not devices.same(here, place):
                    return False
            elif type(item) not in _AT_A_GLANCE:
                return False
    return True


class Arrival:
    """A forward pre-hook: moves what a module is given to the device that its state is on, for as
    long as it runs.

    A copy of the module is no part of the flow, so in a copy the hook does nothing.
    """

    def __init__(self, arrivals: Arrivals | None, device: torch.device) -> None:
        self._arrivals = arrivals
        self._device = device

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Arguments and keyword arguments on the device; None, as they are, in a copy and while a
        graph is made.
        """
        if torch.compiler.is_dynamo_compiling() or self._arrivals is None or not devices.observed():
            return None
        return self._arrivals.enter(self._device).made((args, kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> Arrival:
        return Arrival(None, self._device)

    def __reduce__(self) -> tuple[Any, ...]:
        return Arrival, (None, self._device)


class Departure:
    """A forward hook, the other end of ``Arrival``."""

    def __init__(self, arrivals: Arrivals | None) -> None:
        self._arrivals = arrivals

    def __call__(self, *_: Any) -> None:
        """Put back what the module was given; nothing in a copy and while a graph is made."""
        if (
            not torch.compiler.is_dynamo_compiling()
            and self._arrivals is not None
            and devices.observed()
        ):
            self._arrivals.leave()

    def __deepcopy__(self, memo: dict[int, Any]) -> Departure:
        return Departure(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return Departure, (None,)


class Arrivals:
    """The modules of a model on their devices, while it runs through hooks."""

    def __init__(self, modules: Mapping[nn.Module, torch.device], alignment: Alignment) -> None:
        self._alignment = alignment
        self._handles = [
            handle
            for module, device in modules.items()
            for handle in (
                module.register_forward_pre_hook(
                    Arrival(self, device), with_kwargs=True, prepend=True
                ),
                module.register_forward_hook(Departure(self), always_call=True),
            )
        ]
        self._inside: list[Exchange] = []

    def enter(self, device: torch.device) -> Exchange:
        """A module on this device is entered; what moves the tensors that it is given."""
        self._alignment.place = device
        self._inside.append(Exchange(device))
        return self._inside[-1]

    def leave(self) -> None:
        """The module is left: lists, dicts and objects that it was given have their own tensors
        back.
        """
        if self._inside:  # not where a hook before ``Arrival`` failed
            self._inside.pop().put_back()

    def remove(self) -> None:
        """Leave the modules as they were."""
        for handle in self._handles:
            handle.remove()
