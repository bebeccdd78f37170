"""Execution of a model that cannot be captured, through hooks.

    module with a device      its inputs move to that device before it runs         (Arrival)
    operation between modules its tensors move to one device if they are on several  (Alignment)
                              - the tensor that it writes to stays where it is
                              - else to its parameters' device
                              - else to the latest module's device

The model's own code stays unchanged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from enum import Enum, auto
from functools import lru_cache, partial
from threading import get_ident
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode

from placer import devices
from placer.capture.export.function_modes import ExtendedFunctionMode, Function
from placer.capture.hook_path.packed_sequences import TAKES_LENGTHS, lengths_position
from placer.capture.python_state.mutable_inputs import TemporaryMove
from placer.capture.pytrees import CONSTANTS, flatten

# Names of functions that name their own device, or act on one tensor where it is.
_NOT_ALIGNED = {
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

_LIST_PREFIX = "_foreach_"
"""Prefix of functions over lists, whose n-th tensors belong together, not all tensors."""

_SORTED_LIST_PREFIXES = ("_fused_", "_amp_foreach_")
"""Prefixes of functions over lists that the caller sorted by device; several are written to."""

_FUNCTIONS = (FunctionType, MethodType, partial)

_TYPES_WITHOUT_TENSORS = frozenset({*CONSTANTS, type(...)})
"""Types that contain no tensor."""

_INPLACE_OPERATORS = {
    "__setitem__",
    *(
        f"__i{name}__"
        for name in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split()
    ),
}
"""Names of functions that write to their first argument, in addition to names like ``add_``."""


class _Arguments(Enum):
    """How the tensors of a function's arguments belong together."""

    ANY = auto()
    LENGTHS = auto()
    """One of them may be lengths of packed sequences, which stay on the host."""
    LISTS = auto()
    """The n-th tensors of all lists."""
    APART = auto()
    """Not at all: each stays where it is."""


@lru_cache(4096)
def _arguments_of(name: str) -> _Arguments:
    """Return how the arguments of the functions with a name belong together."""
    if name.startswith(_LIST_PREFIX):
        return _Arguments.LISTS
    if name in _NOT_ALIGNED or name.startswith(_SORTED_LIST_PREFIXES):
        return _Arguments.APART
    return _Arguments.LENGTHS if name in TAKES_LENGTHS else _Arguments.ANY


AlignAgain = Callable[[], AbstractContextManager["Alignment"]]
"""A context in which a checkpoint's second run in the backward pass aligns its operations."""


class Alignment(ExtendedFunctionMode):
    """A mode that moves the tensors of each operation to one device.

    Args:
        renewal: aligns operations that a checkpoint runs again in the backward pass; None leaves
            them.

    Attributes:
        place: the device of the latest module; None before the first.
    """

    def __init__(self, renewal: AlignAgain | None = None) -> None:
        super().__init__()
        self.place: torch.device | None = None
        self._renewal = renewal
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop aligning operations inside.

        If no other mode was entered since, operations inside do not pass through this mode at all.
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
        """Align operations inside ``paused``, or in a thread that did not enter this mode."""
        is_away = not self.is_active
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
        # torch.compile traces code whose inputs are aligned already, such as a branch of
        # torch.cond.
        if self._is_paused or torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        arguments = _arguments_of(name)
        if arguments is _Arguments.LISTS:
            args, kwargs = _align_lists(args, kwargs)
        elif arguments is _Arguments.LENGTHS or (
            arguments is _Arguments.ANY and not _are_on_one_device(args, kwargs)
        ):
            args, kwargs = self._aligned(name, args, kwargs)
        return func(*args, **kwargs)

    def custom_function_arguments(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return a custom function's arguments on one device: it may save them for backward.

        A function among the arguments means a checkpoint written by the user. Its operations are
        aligned when it runs.

        Args:
            args: the positional arguments.
        """
        if self._is_paused:
            return args
        if any(isinstance(one, _FUNCTIONS) for one in args):
            return tuple(
                self.recomputed_function(one) if isinstance(one, _FUNCTIONS) else one
                for one in args
            )
        aligned: tuple[Any, ...] = self._aligned("", args, {})[0]
        return aligned

    def recomputed_function(self, function: Function) -> Function:
        """Return the function so that a checkpoint runs it again on the same devices.

        Args:
            function: what the checkpoint ran in the forward pass.
        """
        renewal, place = self._renewal, self.place
        if renewal is None or self._is_paused:
            return function

        def again(*args: Any, **kwargs: Any) -> Any:
            # A reentrant checkpoint begins its forward pass with this function, too.
            if self.is_active:
                return function(*args, **kwargs)
            with devices.answering(), renewal() as alignment, alignment.resumed():
                latest, alignment.place = alignment.place, place
                try:
                    return function(*args, **kwargs)
                finally:
                    alignment.place = latest

        return again

    def _aligned(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        # torch requires the lengths of packed sequences on the host.
        position = lengths_position(name, args)
        if position is not None:
            lengths = devices.move(args[position], devices.HOST)
            rest, kwargs = self._aligned("", (*args[:position], *args[position + 1 :]), kwargs)
            return (*rest[:position], lengths, *rest[position:]), kwargs
        tensors, structure = flatten((args, kwargs))
        tensors = [tensor for tensor in tensors if isinstance(tensor, Tensor)]
        places = [devices.location(tensor) for tensor in tensors]
        if all(devices.same(place, places[0]) for place in places):
            return args, kwargs
        written, _ = flatten(_written_argument(name, args, kwargs))
        target = devices.location(written[0]) if written else self._target(name, tensors, places)
        moved = [
            tensor
            # torch combines a scalar on the host with tensors on any device.
            if tensor.dim() == 0 and devices.same(place, devices.HOST)
            else devices.move(tensor, target)
            for tensor, place in zip(tensors, places, strict=True)
        ]
        aligned: tuple[Any, Any] = structure.unflatten(moved)
        return aligned

    def _target(self, name: str, tensors: list[Tensor], places: list[torch.device]) -> torch.device:
        if name in _INPLACE_OPERATORS or (name.endswith("_") and not name.endswith("__")):
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


def _written_argument(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the argument that an operation writes to, if its name does not show it."""
    if name in ("batch_norm", "instance_norm"):
        return kwargs.get("running_mean", args[1:2])
    return kwargs.get("out")


def _align_lists(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Move each tensor in lists to the device of its counterpart in the first list."""
    first = next(nest for nest in (*args, *kwargs.values()) if isinstance(nest, (list, tuple)))
    places = [devices.location(tensor) for tensor in first]

    def aligned(nest: Any) -> Any:
        if not isinstance(nest, (list, tuple)) or len(nest) != len(places):
            return nest
        return [
            devices.move(item, place) if isinstance(item, Tensor) else item
            for item, place in zip(nest, places, strict=True)
        ]

    return tuple(map(aligned, args)), {name: aligned(nest) for name, nest in kwargs.items()}


def _are_on_one_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether all tensors are on one device; False for nested arguments."""
    place: torch.device | None = None
    for one in _without_lists(args, kwargs):
        if isinstance(one, Tensor):
            here = devices.location(one)
            if place is None:
                place = here
            elif here != place and not devices.same(here, place):
                return False
        elif type(one) not in _TYPES_WITHOUT_TENSORS:
            return False
    return True


def _without_lists(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield arguments that may be or hold tensors, and the items of those that are lists."""
    for one in (*args, *kwargs.values()) if kwargs else args:
        kind = type(one)
        if kind is list or kind is tuple:
            yield from one
        elif kind not in _TYPES_WITHOUT_TENSORS:
            yield one


class BorrowedWeights(Protocol):
    """Weights that a module has on its device only while it runs."""

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Provide the weights for a call of the module with these arguments."""

    def leave(self) -> None:
        """Take them away."""


class Arrival:
    """A forward pre-hook that moves a module's inputs to its device while it runs.

    A copy of the module does not belong to the flow, so in a copy the hook does nothing.

    Args:
        arrivals: the modules on their devices; None in a copy.
        device: the module's device.
    """

    def __init__(self, arrivals: ModuleHooks | None, device: torch.device) -> None:
        self._arrivals = arrivals
        self._device = device

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments on the device; None in a copy and in torch.compile."""
        if torch.compiler.is_dynamo_compiling() or self._arrivals is None or not devices.observed():
            return None
        moved = self._arrivals.enter(self._device).moved((args, kwargs))
        if (weights := self._arrivals.borrowed().get(module)) is not None:
            weights.enter(*moved)
        return moved

    def __deepcopy__(self, memo: dict[int, Any]) -> Arrival:
        return Arrival(None, self._device)

    def __reduce__(self) -> tuple[Any, ...]:
        return Arrival, (None, self._device)


class Departure:
    """A forward hook that ends what ``Arrival`` began.

    Args:
        arrivals: the modules on their devices; None in a copy.
    """

    def __init__(self, arrivals: ModuleHooks | None) -> None:
        self._arrivals = arrivals

    def __call__(self, module: nn.Module, *_: Any) -> None:
        """Restore the module's inputs; do nothing in a copy and in torch.compile."""
        if (
            not torch.compiler.is_dynamo_compiling()
            and self._arrivals is not None
            and devices.observed()
        ):
            if (weights := self._arrivals.borrowed().get(module)) is not None:
                weights.leave()
            self._arrivals.leave()

    def __deepcopy__(self, memo: dict[int, Any]) -> Departure:
        return Departure(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return Departure, (None,)


class ModuleHooks:
    """The modules of a model on their devices, while the model runs through hooks.

    Args:
        modules: the device of each module.
        borrowed: returns, by module, the weights that it has on its device only while it runs.

    Attributes:
        alignments: by thread, the mode that aligns its operations between the modules.
        borrowed: as given.
    """

    def __init__(
        self,
        modules: Mapping[nn.Module, torch.device],
        borrowed: Callable[[], Mapping[nn.Module, BorrowedWeights]] = dict,
    ) -> None:
        self.borrowed = borrowed
        self.alignments: dict[int, Alignment] = {}
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
        # A stack per thread: modules run inside modules.
        self._inside: defaultdict[int, list[TemporaryMove]] = defaultdict(list)

    def enter(self, device: torch.device) -> TemporaryMove:
        """Note that a module on this device runs, and return the exchange that moves its inputs.

        Args:
            device: the module's device.
        """
        thread = get_ident()
        alignment = self.alignments.get(thread)
        if alignment is not None:
            alignment.place = device
        self._inside[thread].append(TemporaryMove(device))
        return self._inside[thread][-1]

    def leave(self) -> None:
        """Note that the module has finished, and restore its lists, dicts and objects."""
        # Empty if a hook before ``Arrival`` failed.
        if inside := self._inside.get(get_ident()):
            inside.pop().restore()

    def forget(self, thread: int) -> None:
        """Forget a thread, which runs the model no longer.

        Args:
            thread: its number.
        """
        self.alignments.pop(thread, None)
        self._inside.pop(thread, None)

    def remove(self) -> None:
        """Remove the hooks from the modules."""
        for handle in self._handles:
            handle.remove()
