"""A test bench for placements without GPUs.

    with placer.testing.logical_devices(4):
        flow.update_flow(placement)      # on cpu:0 ... cpu:3
        loss = criterion(flow(x), target.to("cpu:0"))
        loss.backward()                  # raises MixedDevicesError for a forgotten transfer

Inside, a CPU stand-in behaves like a separate device. Every storage records its stand-in. An
operation on tensors of two devices raises, as on GPUs. A copy to a device puts its result there. A
tensor created without a stand-in is on the host, ``cpu``. As on GPUs, a scalar (a host tensor
without dimensions) mixes with everything, and a host tensor may index a device tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

from placer.errors import MixedDevicesError
from placer.utils.extras import extra
from placer.utils.option_checks import require_count

with extra("torch"):
    import torch
    from torch import Tensor
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.weak import WeakIdKeyDictionary

    from placer import devices
    from placer.capture.export.nested_ops import run_under_mode
    from placer.devices.tensor_parts import USUAL

__all__ = ["MixedDevicesError", "logical_devices"]

_HOST = -1
# The place of a tensor that autograd, or a composite operation, created without inputs. It only has
# the bare device ``cpu``, so it adopts the device of the tensors that it meets.
_ANYWHERE = -2
_INDEXING = {
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_unsafe_index",
    "aten::_index_put_impl_",
}
_BETWEEN_DEVICES = {
    "aten::copy_",
    "aten::_to_copy",
    "aten::set_",
    "aten::_copy_from",
    "aten::_has_compatible_shallow_copy_type",
}
# The argument of these operations that must be on the host, on GPUs too.
_LENGTHS = {"aten::_pack_padded_sequence": 1, "aten::_pack_padded_sequence_backward": 2}
_PLAIN = frozenset(
    {
        int,
        float,
        bool,
        str,
        type(None),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    }
)
_PURGE_EVERY = 4096
_META, _HOST_DEVICE = torch.device("meta"), torch.device("cpu")
_DEVICE_OF = torch.Tensor.device.__get__


@contextmanager
def logical_devices(count: int) -> Iterator[list[torch.device]]:
    """Make the stand-ins ``cpu:0`` to ``cpu:<count - 1>`` behave like separate devices.

    Args:
        count: number of stand-ins.

    Yields:
        The stand-ins.

    Raises:
        InputError: if ``count`` is not a positive integer.
        MixedDevicesError: inside, if an operation reads tensors of two devices.
    """
    require_count("count", count, "devices")
    tags = _Tags()
    devices.stand_ins.append(count)
    devices.registries.append(tags)
    try:
        with tags.answers, _OneDevicePerOperation(tags):
            yield [torch.device("cpu", index) for index in range(count)]
    finally:
        tags.leaves.release()
        devices.stand_ins.pop()
        devices.registries.pop()


class _Thread(threading.local):
    """What the operations of one thread are part of.

    Attributes:
        alone: the stand-in of the layer that runs, else None.
        composite: the arguments of the composite operation that the dispatched operation is part
            of; True if they do not matter, None without one. Few operations need to know whether
            there are tensors among them, so only those search.
    """

    def __init__(self) -> None:
        self.alone: int | None = None
        self.composite: Any = None


class _Tags:
    """The stand-in of each storage; unknown storages are on the host."""

    def __init__(self) -> None:
        self._of: dict[int | None, tuple[StorageWeakRef, int]] = {}
        self._writes = 0
        # Reentrant: a collection of garbage inside may run operations on tensors.
        self._lock = threading.RLock()
        self.answers = _CopiesAndQueries(self)
        self.leaves = _Leaves(self)
        self.thread = _Thread()

    def get(self, tensor: Tensor) -> int:
        known = self._of.get(_address(tensor))
        return (
            known[1]
            if known is not None and not known[0].expired()  # type: ignore[no-untyped-call]
            else _HOST
        )

    def is_inside_operation(self) -> bool:
        """Return whether the dispatched operation is part of a composite operation on tensors."""
        composite = self.thread.composite
        return composite is True or bool(_tensors(composite))

    def put(self, tensor: Tensor, index: int) -> None:
        try:
            storages = _storages(tensor)
        except (NotImplementedError, RuntimeError):
            return
        with self._lock:
            for storage in storages:
                self._of[storage._cdata] = (
                    StorageWeakRef(storage),  # type: ignore[no-untyped-call]
                    index,
                )
            # storages die without notice, so purge their entries now and then
            self._writes += 1
            if self._writes % _PURGE_EVERY == 0:
                self._of = {
                    key: entry
                    for key, entry in self._of.copy().items()
                    if not entry[0].expired()  # type: ignore[no-untyped-call]
                }

    def land(self, tensor: Tensor, device: torch.device) -> None:
        """Record that the tensor was copied to the device."""
        self.put(tensor, _HOST if device.index is None else device.index)

    def expect(self, tensor: Tensor, device: torch.device) -> None:
        """Raise a MixedDevicesError if a gradient is not on its tensor's device."""
        place, index = self.get(tensor), _HOST if device.index is None else device.index
        if place not in (index, _ANYWHERE) and not (place == _HOST and tensor.dim() == 0):
            raise MixedDevicesError(
                f"a gradient {tuple(tensor.shape)} came back on {_name(place)} for a tensor on "
                f"{_name(index)}; on GPUs this is 'Function returned an invalid gradient'. Move it "
                "back in the backward pass"
            )

    @contextmanager
    def only(self, device: torch.device) -> Iterator[None]:
        """Raise a MixedDevicesError if an operation inside reads tensors of another device."""
        outer = self.thread.alone
        self.thread.alone = device.index
        try:
            yield
        finally:
            self.thread.alone = outer

    def device(self, tensor: Tensor) -> torch.device:
        """Return the tensor's stand-in; the host is ``cpu`` without an index."""
        # the mode below need not see this question
        with torch._C.DisableTorchFunction():
            if tensor.is_meta:
                return _META
        index = self.get(tensor)
        return _HOST_DEVICE if index < 0 else _stand_in(index)

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Check the operations of this thread, too, unless they are checked."""
        if any(
            isinstance(mode, _CopiesAndQueries)
            for mode in _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        ):
            yield
            return
        with _CopiesAndQueries(self), _OneDevicePerOperation(self):
            yield

    def answering(self) -> AbstractContextManager[Any]:
        """Report stand-ins from ``tensor.device`` inside the block.

        Torch disables this mode while ``Tensor.backward`` runs.
        """
        is_here = (
            self.answers in _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        )
        return nullcontext() if is_here else self.answers


@cache
def _stand_in(index: int) -> torch.device:
    return torch.device("cpu", index)


def _address(tensor: Tensor) -> int | None:
    """Return the address of the storage of a tensor's data; None without a storage."""
    if type(tensor) in USUAL:
        try:
            return int(torch._C._storage_address(tensor))  # type: ignore[attr-defined]
        except (NotImplementedError, RuntimeError):
            pass  # sparse, or wrapped by ``torch.func``
    try:
        return int(_storages(tensor)[-1]._cdata)
    except (IndexError, NotImplementedError, RuntimeError, ValueError):
        return None  # functional, fake or empty tensors


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """Return the storages of a tensor's plain parts, unwrapped from ``torch.func``."""
    return [part.untyped_storage() for part in devices.own_parts(devices.unwrapped(tensor))]


def _tensors(nest: Any) -> list[Tensor]:
    """Return the tensors among the leaves of a nest, faster than ``tree_leaves``."""
    found: list[Tensor] = []
    _collect((nest,), found)
    return found


def _collect(items: Iterable[Any], found: list[Tensor]) -> None:
    for item in items:
        kind = type(item)
        if kind in _PLAIN:
            continue
        if isinstance(item, Tensor):
            found.append(item)
        elif kind is tuple or kind is list:
            _collect(item, found)
        elif kind is dict:
            _collect(item.values(), found)
        else:
            found += [leaf for leaf in tree_leaves(item) if isinstance(leaf, Tensor)]


class _Leaves(devices.Onlooker):
    """A gradient hook that verifies that a gradient is on its parameter's device.

    No operation reads both before the optimizer does.
    """

    def __init__(self, tags: _Tags) -> None:
        self._tags = tags
        self._handles = WeakIdKeyDictionary()

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Verify every future gradient of these tensors, if they are leaves."""
        for tensor in tensors:
            if tensor.requires_grad and tensor.is_leaf and tensor not in self._handles:
                self._handles[tensor] = tensor.register_post_accumulate_grad_hook(self)  # type: ignore[no-untyped-call]

    def release(self) -> None:
        """Remove all hooks."""
        for handle in self._handles.values():  # type: ignore[no-untyped-call]
            handle.remove()

    def __call__(self, leaf: Tensor) -> None:
        """Raise a MixedDevicesError if a gradient is not on its parameter's device."""
        # None if another hook took it, to accumulate several in one operation
        gradient = leaf.grad
        if gradient is not None and not gradient.is_sparse:
            self._tags.expect(gradient, self._tags.device(leaf))


class _OneDevicePerOperation(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that checks every operation, autograd's included.

    Inputs must be on one device, and results are recorded there.
    """

    supports_higher_order_operators = True

    def __init__(self, tags: _Tags) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tags = tags

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not devices.observed():
            return func(*args, **kwargs)
        tensors = _tensors((args, kwargs))
        self._tags.leaves.watch(tensors)
        if any(map(devices.dispatches, types)):
            # the subclass decomposes the operation; this mode checks the operations inside
            return NotImplemented
        if isinstance(func, torch._ops.HigherOrderOperator):
            return self._nested(func, args, kwargs, tensors)
        name = func._schema.name
        if name in _BETWEEN_DEVICES:
            result = func(*args, **kwargs)
            self._land(args, kwargs, result)
            return result
        if name.startswith("aten::_foreach") or name.startswith("aten::_fused"):
            self._check_each(name, args)
            result = func(*args, **kwargs)
            self._spread(args, result)
            return result
        given = kwargs.get("device")
        place = self._place(name, args, tensors)
        # a factory function: an explicit stand-in wins; a bare cpu is the host for user code, and
        # unknown for internals of autograd or of a composite operation
        if given is not None and given.type == devices.CPU:
            is_part = torch._C._current_graph_task_id() != -1 or self._tags.is_inside_operation()
            nowhere = _ANYWHERE if is_part else _HOST
            place = nowhere if given.index is None else given.index
        result = func(*args, **kwargs)
        self._tag(result[:1] if name == "aten::_pack_padded_sequence" else result, place)
        return result

    def _nested(self, operation: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
        """Run a higher-order operation, and check the operations in its subgraphs."""
        place = self._one(operation.name(), tensors)
        thread = self._tags.thread
        outer, thread.composite = thread.composite, True
        try:
            result = run_under_mode(self, operation, args, kwargs)
        finally:
            thread.composite = outer
        self._tag(result, place)
        return result

    def _place(self, name: str, args: Any, tensors: Sequence[Tensor]) -> int:
        """Return the common device of an operation's tensors.

        Args:
            name: of the operation.
            args: its positional arguments.
            tensors: those in all of its arguments.
        """
        if name in _INDEXING:
            tensors = _tensors((args[0], *args[2:]))
        if (position := _LENGTHS.get(name)) is not None:
            if (there := self._tags.get(args[position])) >= 0:
                raise _not_on_host(name, there)
            tensors = _tensors((*args[:position], *args[position + 1 :]))
        return self._one(name, tensors)

    def _one(self, name: str, tensors: Iterable[Tensor]) -> int:
        place, first = _HOST, None
        on_host: Tensor | None = None
        for tensor in tensors:
            index = self._tags.get(tensor)
            if index == _ANYWHERE:
                place = place if first is not None else _ANYWHERE
                continue
            if index == _HOST:
                # torch accepts a scalar of the host together with tensors of a device.
                if tensor.dim() and tensor.numel():
                    on_host = tensor
                continue
            if first is not None and index != place:
                raise _mixed(name, first, tensor, place, index)
            place, first = index, tensor
        if first is not None and on_host is not None:
            raise _mixed(name, first, on_host, place, _HOST)
        if first is not None and self._tags.thread.alone not in (None, place):
            raise _elsewhere(name, first, place, self._tags.thread.alone)
        return _HOST if on_host is not None else place

    def _check_each(self, name: str, args: Any) -> None:
        lists = [
            item
            for item in args
            if isinstance(item, (list, tuple)) and item and isinstance(item[0], Tensor)
        ]
        for together in zip(*lists, strict=False):
            self._one(name, together)

    def _spread(self, args: Any, result: Any) -> None:
        # _foreach_pow has its list after the number
        sources = next((item for item in args if isinstance(item, (list, tuple))), ())
        if isinstance(result, (list, tuple)):
            for source, made in zip(sources, result, strict=False):
                if isinstance(made, Tensor) and isinstance(source, Tensor):
                    self._tag(made, self._tags.get(source))

    def _land(self, args: Any, kwargs: Any, result: Any) -> None:
        """Record the stand-in that a copy lands on.

        Without a named stand-in (a change of dtype, for example) it stays with its source. Copies
        to the host report themselves, see ``devices.copy``: here a bare ``cpu`` may also come from
        autograd casting a gradient back.
        """
        target = kwargs.get("device")
        place = self._tags.get(args[0]) if target is None or target.index is None else target.index
        if place == _ANYWHERE and len(args) > 1 and isinstance(args[1], Tensor):
            place = self._tags.get(args[1])
        self._tag(result, place)

    def _tag(self, result: Any, place: int) -> None:
        if place == _HOST:
            return
        for tensor in _tensors(result):
            if self._tags.get(tensor) in (_HOST, _ANYWHERE):
                self._tags.put(tensor, place)


class _CopiesAndQueries(TorchFunctionMode):
    """A function mode in which ``tensor.device`` returns the stand-in and ``tensor.to`` copies.

    The copies are differentiable; ``tensor.cpu`` is one of them.
    """

    def __init__(self, tags: _Tags) -> None:
        super().__init__()
        self._tags = tags

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling() or not devices.observed():
            return func(*args, **kwargs)
        if func == _DEVICE_OF:
            return self._tags.device(args[0])
        if func is torch.Tensor.cpu:
            return devices.move(args[0], torch.device("cpu"))
        if func is torch.Tensor.to:
            return self._to(*args, **kwargs)
        if func is torch.tensor:
            return self._from_numbers(*args, **kwargs)
        thread = self._tags.thread
        outer, thread.composite = thread.composite, (args, kwargs)
        try:
            return func(*args, **kwargs)
        finally:
            thread.composite = outer

    def _from_numbers(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the result of ``torch.tensor``, recorded on its device.

        Its copy to the device dispatches no visible operation.
        """
        made = torch.tensor(*args, **kwargs)
        if kwargs.get("device") is not None:
            self._tags.land(made, torch.device(kwargs["device"]))
        return made

    def _to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        duplicate = bool(kwargs.pop("copy", False))
        if args and isinstance(args[0], Tensor):
            args = (self._tags.device(args[0]), args[0].dtype, *args[1:])
        if "other" in kwargs:
            other = kwargs.pop("other")
            kwargs |= {"device": self._tags.device(other), "dtype": other.dtype}
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        moved = tensor
        if device is not None and device.type == devices.CPU:
            moved = devices.move(tensor, device)
        options: dict[str, Any] = {"copy": duplicate and moved is tensor}
        if layout is not None:
            options["memory_format"] = layout
        return moved.to(dtype=dtype or moved.dtype, **options)


def _mixed(
    name: str, one: Tensor, other: Tensor, place: int, other_place: int
) -> MixedDevicesError:
    first, second = (_name(place), tuple(one.shape)), (_name(other_place), tuple(other.shape))
    return MixedDevicesError(
        f"{name} met tensors on two devices, {first[0]} {first[1]} and {second[0]} {second[1]}; on "
        "GPUs this is 'Expected all tensors to be on the same device'. Move one with .to(...) "
        "before"
    )


def _elsewhere(name: str, tensor: Tensor, place: int, current: int | None) -> MixedDevicesError:
    return MixedDevicesError(
        f"{name} met a tensor on cpu:{place} {tuple(tensor.shape)} in a layer that runs on "
        f"cpu:{current}; the transfer of what the layer reads was forgotten"
    )


def _not_on_host(name: str, place: int) -> MixedDevicesError:
    return MixedDevicesError(
        f"{name} takes lengths from the host, and met them on cpu:{place}; on GPUs this is "
        "'lengths argument should be a 1D CPU int64 tensor'. Move them with .cpu() before"
    )


def _name(place: int) -> str:
    return "the host (cpu)" if place < 0 else f"cpu:{place}"
