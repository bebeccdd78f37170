"""The operations of one pass of a model, as torch's dispatcher sees them.

    with OperationTrace() as trace:
        model(...)
    trace.operations      # function, arguments, device, which values it reads, writes and makes

A value is a tensor; it has a number, in the order of appearance. Values that the pass did not make
are external: parameters, inputs, caches and constants. Two passes whose traces are equal did the
same work on other numbers, so the trace can be run again in their place.

A number that the pass reads on the host, such as whether a mask hides any token, decides what the
pass does next. So a later pass is the same only if it reads the same number: see ``Guard``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from placer import devices

_READS_ON_THE_HOST = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

_READS_A_NUMBER = "aten::_local_scalar_dense"
"""The operation that returns the only element of a tensor as a number of Python."""

_LIFT = "aten::lift_fresh"
"""The operation that torch dispatches for a new tensor of Python numbers."""


_ALIASES = {"aten::detach", "aten::alias"}
"""Operations whose result is the same tensor again."""


class Value(NamedTuple):
    """The number of a tensor, in place of the tensor among the arguments of an operation."""

    number: int


@dataclass
class Operation:
    """One operation of a pass.

    Attributes:
        function: the overload that ran.
        args: positional arguments, with a ``Value`` in place of each tensor.
        kwargs: keyword arguments, likewise.
        reads: numbers of the tensors among the arguments.
        writes: the arguments that it changes in place.
        makes: numbers of the resulting tensors.
        device: where it ran; the target of a transfer.
        is_transfer: whether it copies a tensor from one device to another.
        places: where among its results these tensors are; None if there is a single result.
    """

    function: Any
    args: Any
    kwargs: Any
    reads: list[int]
    writes: list[int]
    makes: list[int]
    device: torch.device
    is_transfer: bool = False
    places: Sequence[int] | None = None

    def equals(self, other: Operation) -> bool:
        """Return whether two operations do the same work on values of the same numbers."""
        return (
            self.function is other.function
            and self.makes == other.makes
            and self.device == other.device
            and _equal(self.args, other.args)
            and _equal(self.kwargs, other.kwargs)
        )


@dataclass
class Guard:
    """A number that the pass reads on the host.

    Attributes:
        number: of the tensor that holds it.
        value: the number.
        operations: compute the tensor from inputs and other state before the pass.
    """

    number: int
    value: float | int | bool
    operations: list[Operation]

    def equals(self, other: Guard) -> bool:
        """Return whether two passes read the same number."""
        return self.number == other.number and _equal(self.value, other.value)


@dataclass
class Trace:
    """The operations of one pass and their values.

    Attributes:
        operations: in the order in which they ran.
        externals: by number, the tensors that the pass read and did not make.
        constants: by number, tensors that the pass made of Python numbers.
        arrived: by number, the results of transfers.
        storages: by number, the storage of a value; views share the storage of their base.
        devices: by number, the device of a value.
        guards: the numbers that the pass reads on the host.
        obstacle: why the pass cannot be run again from the trace; empty if it can.
    """

    operations: list[Operation] = field(default_factory=list)
    externals: dict[int, Tensor] = field(default_factory=dict)
    constants: dict[int, Tensor] = field(default_factory=dict)
    arrived: dict[int, Tensor] = field(default_factory=dict)
    storages: dict[int, int] = field(default_factory=dict)
    devices: dict[int, torch.device] = field(default_factory=dict)
    guards: list[Guard] = field(default_factory=list)
    obstacle: str = ""

    def written(self) -> set[int]:
        """Return the numbers of the values that the pass changes in place."""
        return {number for operation in self.operations for number in operation.writes}

    def changed(self) -> list[Tensor]:
        """Return the external tensors whose memory the pass changes."""
        memory = {self.storages[number] for number in self.written()}
        return [one for number, one in self.externals.items() if self.storages[number] in memory]

    def difference(self, other: Trace) -> str:
        """Describe the first difference between two passes; return "" if they are equal."""
        for number, (one, two) in enumerate(zip(self.operations, other.operations, strict=False)):
            if not one.equals(two):
                return (
                    f"operation {number}, {one.function}, differs from token to token: its numbers "
                    "or shapes depend on the position"
                )
        if not _all_equal(self.guards, other.guards):
            return "it reads numbers on the host that differ from token to token"
        if len(self.operations) != len(other.operations):
            return "the number of operations differs from token to token"
        if self.externals.keys() != other.externals.keys():
            return "it reads other tensors from token to token"
        for number, tensor in self.externals.items():
            again = other.externals[number]
            if number in self.constants:
                if not _equal_values(tensor, again):
                    return "it makes a tensor of Python numbers that differ from token to token"
            elif not _same_memory(tensor, again):
                return f"it reads a new tensor {tuple(tensor.shape)} that torch did not make"
        return ""


class OperationTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that notes every operation and runs it.

    Args:
        computes_on_host: whether layers of the model are on the CPU. Otherwise a copy to the host
            is a sign that the pass depends on numbers there, and forbids a recording.

    Attributes:
        trace: what was noted so far.
    """

    supports_higher_order_operators = True

    def __init__(self, computes_on_host: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self._computes_on_host = computes_on_host
        self._numbers = WeakIdKeyDictionary()
        self._constant: set[int] = set()
        self._lifted_storages: set[int] = set()
        self._external_storages: dict[int, int] = {}
        self._storages = 0
        self._count = 0

    def number(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor; None if no operation read or made it."""
        found: int | None = self._numbers.get(tensor)  # type: ignore[no-untyped-call]
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not devices.observed():
            return func(*args, **kwargs)
        if not isinstance(func, torch._ops.OpOverload):
            self._refuse(f"it contains {func}, an operation with functions inside")
            return func(*args, **kwargs)
        given = list(tensors_of((args, kwargs)))
        is_lifted = func._schema.name == _LIFT
        reads = [self._read(tensor, is_lifted) for tensor in given]
        result = func(*args, **kwargs)
        if func._schema.name in _ALIASES:
            self._numbers[result] = reads[0]
        else:
            self._note(func, args, kwargs, reads, given, result)
        return result

    def _note(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        reads: list[int],
        given: list[Tensor],
        result: Any,
    ) -> None:
        made = list(tensors_of(result))
        if not given and not made:
            return
        if func._schema.name == _READS_A_NUMBER:
            self._guard(func, reads[0], result)
            return
        if _READS_ON_THE_HOST.intersection(func.tags) and not _has_fixed_shape(func, args):
            self._refuse(f"{func} reads values of a tensor on the host")
        writes = [self._numbers[one] for one in _written(func, args, kwargs)]
        is_transfer, device = self._place(func, kwargs, writes, reads, made)
        is_constant = not writes and all(number in self._constant for number in reads)
        makes = [self._made(tensor, device, reads, given, is_constant) for tensor in made]
        if is_transfer:
            self.trace.arrived.update(zip(makes, made, strict=True))
        elif is_constant and devices.same(device, devices.HOST):
            # an operation of a GPU may read them: the recording keeps their values
            self.trace.constants.update(
                {number: one for number, one in zip(makes, made, strict=True) if not one.dim()}
            )
        self._note_written(func, writes)
        values = self._numbers
        self.trace.operations.append(
            Operation(
                func,
                _numbered(args, values),
                _numbered(kwargs, values),
                reads,
                writes,
                makes,
                device,
                is_transfer,
                _places(result),
            )
        )

    def _note_written(self, func: Any, writes: Iterable[int]) -> None:
        """Note the values that an operation changes in place."""
        for number in writes:
            self._constant.discard(number)
            if self.trace.storages[number] in self._lifted_storages:
                self._refuse(f"{func} changes a tensor that was made of Python numbers")

    def _guard(self, func: Any, number: int, value: Any) -> None:
        """Note a number that the pass reads on the host, and that does not depend on weights."""
        if number in self._constant:
            return
        trace, needed, found = self.trace, {number}, list[Operation]()
        for operation in reversed(trace.operations):
            if not needed.isdisjoint(operation.makes):
                needed.update(operation.reads)
                found.append(operation)
        written = {trace.storages[one] for one in trace.written()}
        has_weights = any(isinstance(trace.externals.get(one), nn.Parameter) for one in needed)
        if has_weights or any(trace.storages[one] in written for one in needed):
            self._refuse(f"{func} reads values of a tensor on the host")
            return
        trace.guards.append(Guard(number, value, found[::-1]))

    def _place(
        self,
        func: Any,
        kwargs: Any,
        writes: list[int],
        reads: list[int],
        made: list[Tensor],
    ) -> tuple[bool, torch.device]:
        """Return whether an operation is a transfer, and its device."""
        places = self.trace.devices
        name = func._schema.name
        if name == "aten::_to_copy" and kwargs.get("device") is not None:
            source, target = places[reads[0]], _named(kwargs["device"], made[0])
            return not devices.same(source, target), self._entered(source, target)
        if name == "aten::copy_":
            source, target = places[reads[1]], places[reads[0]]
            # The recording keeps numbers of the host, so these need no transfer.
            is_number = devices.same(source, devices.HOST) and reads[1] in self._constant
            is_transfer = not devices.same(source, target) and not is_number
            return is_transfer, self._entered(source, target)
        where = [places[number] for number in reads]
        host = [number for number in reads if devices.same(places[number], devices.HOST)]
        off_host = [place for place in where if not devices.same(place, devices.HOST)]
        if not off_host:
            return False, where[0] if where else devices.location(made[0])
        if any(place != off_host[0] for place in off_host):
            self._refuse(f"{func} reads tensors of several devices")
        if not self._constant.issuperset(host):
            self._refuse(f"{func} reads a tensor of the host")
        return False, off_host[0]

    def _entered(self, source: torch.device, target: torch.device) -> torch.device:
        """Return the target of a copy; note if it forbids a recording."""
        if devices.same(source, target):
            return source
        if devices.same(target, devices.HOST) and not self._computes_on_host:
            self._refuse("it copies a tensor to the host")
        return target

    def note_action(self, action: Any, device: torch.device) -> None:
        """Note something that the pass does on a device, in addition to operations of torch.

        Args:
            action: a function without arguments; an equal pass has the same object here.
            device: where it happens.
        """
        self.trace.operations.append(Operation(action, (), {}, [], [], [], device))

    def _read(self, tensor: Tensor, is_lifted: bool) -> int:
        """Return the number of an argument, a new number for an external tensor."""
        known = self.number(tensor)
        if known is not None:
            return known
        number = self._next(tensor)
        self.trace.externals[number] = tensor
        self.trace.devices[number] = devices.location(tensor)
        key = _storage_key(tensor)
        if key not in self._external_storages:
            self._external_storages[key] = self._new_storage()
        self.trace.storages[number] = self._external_storages[key]
        if is_lifted:
            self._constant.add(number)
            self._lifted_storages.add(self.trace.storages[number])
            self.trace.constants[number] = tensor
        return number

    def _made(
        self,
        tensor: Tensor,
        device: torch.device,
        reads: list[int],
        given: list[Tensor],
        is_constant: bool,
    ) -> int:
        """Return the number of a result, which is an argument's if it is the same tensor."""
        known = self.number(tensor)
        if known is not None:
            return known
        number = self._next(tensor)
        self.trace.devices[number] = device
        key = _storage_key(tensor)
        base = (read for read, one in zip(reads, given, strict=True) if _storage_key(one) == key)
        origin = next(base, None)
        self.trace.storages[number] = (
            self._new_storage() if origin is None else self.trace.storages[origin]
        )
        if is_constant:
            self._constant.add(number)
        return number

    def _next(self, tensor: Tensor) -> int:
        number = self._count
        self._count += 1
        self._numbers[tensor] = number
        return number

    def _new_storage(self) -> int:
        self._storages += 1
        return self._storages

    def _refuse(self, why: str) -> None:
        self.trace.obstacle = self.trace.obstacle or why


def tensors_of(nest: Any) -> Iterator[Tensor]:
    """Yield the tensors among the arguments or results of an operation."""
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, (tuple, list)):
        for item in nest:
            yield from tensors_of(item)
    elif isinstance(nest, dict):
        for item in nest.values():
            yield from tensors_of(item)


def _places(result: Any) -> list[int] | None:
    """Return the places of the tensors among the results of an operation; None for one result."""
    if not isinstance(result, (tuple, list)):
        return None
    return [place for place, one in enumerate(result) if isinstance(one, Tensor)]


def _numbered(nest: Any, numbers: Any) -> Any:
    """Return arguments with a ``Value`` in place of each tensor."""
    if isinstance(nest, Tensor):
        return Value(numbers[nest])
    if isinstance(nest, (tuple, list)):
        return type(nest)(_numbered(item, numbers) for item in nest)
    if isinstance(nest, dict):
        return {name: _numbered(item, numbers) for name, item in nest.items()}
    return nest


def filled(nest: Any, values: Mapping[int, Any]) -> Any:
    """Return arguments with a value in place of each ``Value``, by its number."""
    kind = type(nest)
    if kind is Value:
        return values[nest.number]
    if kind is list or kind is tuple:
        return kind(filled(item, values) for item in nest)
    if kind is dict:
        return {name: filled(item, values) for name, item in nest.items()}
    return nest


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Yield the arguments that an operation changes in place."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        yield from tensors_of(value)


def _has_fixed_shape(func: Any, args: Any) -> bool:
    """Return whether an operation takes entries at given places: only a mask has another number."""
    return func._schema.name == "aten::index" and not any(
        index.dtype in (torch.bool, torch.uint8) for index in tensors_of(args[1])
    )


def _named(device: Any, made: Tensor) -> torch.device:
    """Return the device that a copy names, with the index that torch chose."""
    target = torch.device(device)
    if devices.same(target, devices.HOST):
        return devices.HOST  # as torch reports it, without an index
    if target.type != devices.CPU and target.index is None:
        return made.device
    return target


def _storage_key(tensor: Tensor) -> int:
    """Return a key that tensors with common memory share."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def _all_equal(some: Sequence[Guard], others: Sequence[Guard]) -> bool:
    return len(some) == len(others) and all(map(Guard.equals, some, others))


def _equal(one: Any, other: Any) -> bool:
    """Return whether two arguments are equal, without comparing tensors."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[name], other[name]) for name in one)
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are the same one, or views of the same memory."""
    if one is other:
        return True
    try:
        return (
            one.data_ptr() == other.data_ptr()
            and one.shape == other.shape
            and one.stride() == other.stride()
            and one.dtype == other.dtype
        )
    except RuntimeError:
        return False


def _equal_values(one: Tensor, other: Tensor) -> bool:
    with devices.unobserved():
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
