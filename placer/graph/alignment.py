"""Running a model that cannot be captured: modules on their devices, functional operations aligned between them.

A module that has a device gets its inputs moved there. An operation between modules whose tensors are on several
devices runs where its parameters are, else where the latest module ran.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import utils as functorch
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from placer import devices
from placer.graph.handed import Exchange
from placer.graph.packed import lengths_of
from placer.graph.structure import CONSTANTS, flatten

_KEEPS_ITS_PLACE = {
    "to",
    "cpu",
    "cuda",
    "copy_",
    "__get__",
    "__set__",
    "backward",
    "grad",
    "set_",
    "requires_grad_",
    "register_hook",
}

_AT_A_GLANCE = frozenset(CONSTANTS)
"""What holds no tensor."""

_WRITES = {
    "__setitem__",
    *(f"__i{name}__" for name in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split()),
}
"""What writes to its first argument, beside what is named so: ``add_``."""

Observer = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
"""Called after every function with (function, args, kwargs, result)."""


class Alignment(TorchFunctionMode):
    """Moves the tensors of one operation to one device.

    Attributes:
        place: the device of the latest module; None before the first.
        is_on: whether operations are aligned now.
    """

    def __init__(self, observer: Observer | None = None) -> None:
        super().__init__()
        self.place: torch.device | None = None
        self.is_on = False
        self._observer = observer
        self._is_paused = self._is_there = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """In it operations are not aligned; where no other mode was entered since, they do not pass by here at all."""
        is_latest = _get_current_function_mode() is self  # type: ignore[no-untyped-call]
        was, self._is_paused = self._is_paused, True
        if is_latest:
            self._leave()
        try:
            yield
        finally:
            if is_latest:
                self._enter()
            self._is_paused = was

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """In it, inside ``paused``, they are."""
        is_away = not self._is_there
        was, self._is_paused = self._is_paused, False
        if is_away:
            self._enter()
        try:
            yield
        finally:
            if is_away:
                self._leave()
            self._is_paused = was

    def _enter(self) -> None:
        self._is_there = True
        super().__enter__()  # type: ignore[no-untyped-call]

    def _leave(self, *error: Any) -> None:
        self._is_there = False
        super().__exit__(*(error or (None, None, None)))  # type: ignore[no-untyped-call]

    def __enter__(self) -> Alignment:
        self.is_on = True
        self._enter()
        _custom_functions.begin(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _custom_functions.end()
        self.is_on = False
        self._leave(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            self._is_paused or torch.compiler.is_dynamo_compiling()
        ):  # a branch of torch.cond, say: what it is given is aligned
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name not in _KEEPS_ITS_PLACE:
            args, kwargs = self._aligned(name, args, kwargs)
        result = func(*args, **kwargs)
        if self._observer is not None:
            self._observer(func, args, kwargs, result)
        return result

    def aligned(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What an ``autograd.Function`` is given, all of it on one device: it may keep it for its backward pass."""
        return (args, kwargs) if self._is_paused else self._aligned("", args, kwargs)

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
        written, _ = flatten(kwargs.get("out"))
        target = devices.location(written[0]) if written else self._target(name, tensors, places)
        moved = [
            tensor if tensor.dim() == 0 and devices.same(place, devices.HOST) else devices.move(tensor, target)
            for tensor, place in zip(tensors, places, strict=True)
        ]
        aligned: tuple[Any, Any] = structure.unflatten(moved)
        return aligned

    def _target(self, name: str, tensors: list[Tensor], places: list[torch.device]) -> torch.device:
        if name in _WRITES or (name.endswith("_") and not name.endswith("__")):
            return places[0]
        owners = [place for tensor, place in zip(tensors, places, strict=True) if isinstance(tensor, nn.Parameter)]
        if owners:
            return owners[0]
        if self.place is not None and any(devices.same(place, self.place) for place in places):
            return self.place
        return next((place for tensor, place in zip(tensors, places, strict=True) if tensor.dim()), places[0])


def _are_together(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it is seen at a glance, as of most operations, that all tensors are on one device."""
    places = []
    for given in (args, kwargs.values()):
        for one in given:
            if isinstance(one, Tensor):
                places.append(devices.location(one))
            elif type(one) not in _AT_A_GLANCE:
                return False
    return all(devices.same(place, places[0]) for place in places)


class _CustomFunctions:
    """Aligns what custom functions are given, too: ``apply`` is none of torch's functions, so that no mode sees it.

    What it calls first on its arguments is another function as long as any thread aligns; in threads that do not, that
    does what it did. (``apply`` itself may be known by other names: ``product = Product.apply``.)
    """

    def __init__(self) -> None:
        self._lock, self._count, self._was = threading.Lock(), 0, functorch.unwrap_dead_wrappers
        self._here = threading.local()

    def begin(self, alignment: Alignment) -> None:
        """Align in this thread."""
        self._here.alignments = [*getattr(self._here, "alignments", ()), alignment]
        with self._lock:
            self._count += 1
            if self._count == 1:
                self._was = functorch.unwrap_dead_wrappers
                functorch.unwrap_dead_wrappers = self._unwrapped

    def end(self) -> None:
        """Align no longer, or as before the last ``begin`` of this thread."""
        self._here.alignments = self._here.alignments[:-1]
        with self._lock:
            self._count -= 1
            if not self._count:
                functorch.unwrap_dead_wrappers = self._was

    def _unwrapped(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        alignments = getattr(self._here, "alignments", ())
        if alignments and not torch.compiler.is_dynamo_compiling():
            args, _ = alignments[-1].aligned(args, {})
        return self._was(args)


_custom_functions = _CustomFunctions()


class Arrival:
    """A forward pre-hook: moves what a module is given to the device that its state is on, for as long as it runs.

    A copy of the module is no part of the flow, so in a copy the hook does nothing.
    """

    def __init__(self, arrivals: Arrivals | None, device: torch.device) -> None:
        self._arrivals = arrivals
        self._device = device

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Arguments and keyword arguments on the device; None, as they are, in a copy and while a graph is made."""
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
        if not torch.compiler.is_dynamo_compiling() and self._arrivals is not None and devices.observed():
            self._arrivals.leave()

    def __deepcopy__(self, memo: dict[int, Any]) -> Departure:
        return Departure(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return Departure, (None,)


class Again:
    """Hooks of a module that a checkpoint runs again in the backward pass: its operations are aligned there too.

    A copy of the module is no part of the flow, so in a copy the hooks do nothing.
    """

    def __init__(self, alignment: Alignment | None, begins: bool, entered: list[bool]) -> None:
        self._alignment = alignment
        self._begins = begins
        self._entered = entered

    @classmethod
    def of(cls, module: nn.Module, alignment: Alignment) -> list[Any]:
        """Put them on a module; what takes them away again."""
        entered: list[bool] = []
        return [
            module.register_forward_pre_hook(cls(alignment, True, entered), prepend=True),
            module.register_forward_hook(cls(alignment, False, entered), always_call=True),
        ]

    def __call__(self, *_: Any) -> None:
        """Begin to align operations, where they are not, or end it where it was begun."""
        if self._alignment is None:
            return
        if self._begins:
            self._entered.append(not self._alignment.is_on)
            if self._entered[-1]:
                self._alignment.__enter__()
        elif self._entered.pop():
            self._alignment.__exit__(None, None, None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Again:
        return Again(None, self._begins, [])

    def __reduce__(self) -> tuple[Any, ...]:
        return Again, (None, self._begins, [])


class Arrivals:
    """The modules of a model on their devices, while it runs through hooks."""

    def __init__(self, modules: Mapping[nn.Module, torch.device], alignment: Alignment) -> None:
        self._alignment = alignment
        self._handles = [
            handle
            for module, device in modules.items()
            for handle in (
                module.register_forward_pre_hook(Arrival(self, device), with_kwargs=True, prepend=True),
                module.register_forward_hook(Departure(self), always_call=True),
            )
        ]
        self._inside: list[Exchange] = []
        self._again: set[nn.Module] = set()

    @property
    def stays(self) -> bool:
        """Whether a backward pass will run modules again."""
        return bool(self._again)

    def enter(self, device: torch.device) -> Exchange:
        """A module on this device is entered; what moves the tensors that it is given."""
        self._alignment.place = device
        self._inside.append(Exchange(lambda tensor: devices.move(tensor, device)))
        return self._inside[-1]

    def leave(self) -> None:
        """The module is left: lists, dicts and objects that it was given have their own tensors back."""
        if self._inside:  # not where a hook before ``Arrival`` failed
            self._inside.pop().put_back()

    def stay(self, modules: Iterable[nn.Module]) -> None:
        """Be there in the backward pass too, when a checkpoint runs these modules again."""
        for module in set(modules) - self._again:
            self._again.add(module)
            self._handles += Again.of(module, self._alignment)

    def remove(self) -> None:
        """Leave the modules as they were."""
        for handle in self._handles:
            handle.remove()
