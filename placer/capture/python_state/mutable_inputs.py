"""Inputs whose lists, dicts, objects and tensors a model's code writes to.

    cache.update(keys)     # graph: it returns the new tensors; the call stores them in the object
    kept[:, place] = x     # graph: it works on a copy and returns that; the call writes it back
    states.append(x)       # hooks: forward gets the caller's list, with its tensors moved meanwhile

In each case the caller finds what an eager call would have left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor, fx

from placer import devices
from placer.capture.grouping import storage_roots, written_arguments
from placer.capture.pytrees import (
    CONSTANTS,
    SYMBOLIC_NUMBERS,
    Structure,
    attributes_of,
    container_parts,
    flatten_inputs,
    is_constant,
)


@dataclass(frozen=True)
class InputChanges:
    """What forward left in its inputs; the new tensors follow the graph's results.

    Attributes:
        structure: structure of ``(args, kwargs)`` afterwards.
        sources: for each tensor in it, its index among the given tensors followed by the made ones.
        written: pairs (index of a given tensor that is written to, index of its value among the
            made ones).
        paths: where each made tensor is, for messages.
    """

    structure: Structure
    sources: tuple[int, ...]
    written: tuple[tuple[int, int], ...]
    paths: tuple[str, ...]

    def write_back(self, nest: Any, given: Sequence[Any], made: Sequence[Any]) -> None:
        """Write the new tensors and values into the caller's objects.

        Args:
            nest: ``(args, kwargs)``.
            given: the tensors in it.
            made: the tensors that follow the graph's results.
        """
        for place, value in self.written:
            _write(given[place], made[value])
        tensors = [*given, *made]
        write_back(nest, self.structure.unflatten([tensors[place] for place in self.sources]))


def input_changes(
    nest: Any, given: Sequence[Any], inputs: Structure, copied: set[int]
) -> tuple[list[Any], InputChanges | None]:
    """Return the tensors that forward made and left in its inputs.

    Args:
        nest: ``(args, kwargs)`` after forward.
        given: the tensors that were in it before.
        inputs: its structure before.
        copied: indices of the tensors that were copied, because forward writes to them.

    Returns:
        The made tensors and where they belong; ([], None) if forward changed nothing.
    """
    leaves, after = flatten_inputs(*nest)
    places = {id(tensor): place for place, tensor in enumerate(given)}
    as_before = [places.get(id(leaf)) for leaf in leaves] == list(range(len(given)))
    if after.key == inputs.key and as_before and not copied:
        return [], None
    written = tuple((place, index) for index, place in enumerate(sorted(copied)))
    # The new values of written tensors come first, then the new tensors.
    made, paths = (
        [given[place] for place, _ in written],
        [inputs.paths[place] for place, _ in written],
    )
    sources = []
    for leaf, path in zip(leaves, after.paths, strict=True):
        if id(leaf) not in places:
            places[id(leaf)] = len(given) + len(made)
            made.append(leaf)
            paths.append(path)
        sources.append(places[id(leaf)])
    return made, InputChanges(after, tuple(sources), written, tuple(paths))


def written_inputs(graph: fx.Graph) -> set[int]:
    """Return the indices of the inputs that the graph writes to.

    Args:
        graph: a captured graph.
    """
    operations = [node for node in graph.nodes if node.op == "call_function"]
    writes = [target for node in operations for target in written_arguments(node)]
    if not writes:
        return set()
    roots = storage_roots(operations)
    family = {root for target in writes for root in roots.get(target, {target})}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return {place for place, node in enumerate(inputs) if node in family}


def write_back(nest: Any, after: Any) -> Any:
    """Make lists, dicts and objects of a nest hold what their counterparts in another nest hold.

    Args:
        nest: what a caller gave.
        after: a copy of it that forward may have written to.

    Returns:
        The nest itself if it is mutable; a new tuple if a part of a tuple changed; otherwise
        ``after``.
    """
    if (
        nest is after
        or type(nest) is not type(after)
        or isinstance(nest, (Tensor, *CONSTANTS, *SYMBOLIC_NUMBERS))
    ):
        return after
    if is_constant(nest):
        return after
    if isinstance(nest, tuple):
        _, children, assemble = container_parts(nest) or ([], [], tuple)
        items = list(map(write_back, children, after))
        return (
            nest if len(nest) == len(after) and all(map(is_, items, children)) else assemble(items)
        )
    # Change mutable objects in place, since the caller may also refer to them from elsewhere.
    if isinstance(nest, list):
        items = [*map(write_back, nest, after), *after[len(nest) :]]
        if len(items) != len(nest) or not all(map(is_, items, nest)):
            nest[:] = items
    elif isinstance(nest, dict):
        _write_back_items(nest, after)
    else:
        _write_back_attributes(nest, after)
    return nest


def _write_back_items(nest: dict[Any, Any], after: dict[Any, Any]) -> None:
    for key in [key for key in nest if key not in after]:
        del nest[key]
    for key, value in after.items():
        held = write_back(nest[key], value) if key in nest else value
        # Only changed items: a dict's own __setitem__ may do more than store a value.
        if key not in nest or held is not nest[key]:
            nest[key] = held


def _write_back_attributes(nest: Any, after: Any) -> None:
    had, has = dict(attributes_of(nest) or {}), attributes_of(after) or {}
    for name in had.keys() - has.keys():
        object.__delattr__(nest, name)
    for name, value in has.items():
        held = write_back(had[name], value) if name in had else value
        # Through object: the class may be a frozen dataclass.
        if name not in had or held is not had[name]:
            object.__setattr__(nest, name, held)


class TemporaryMove:
    """Temporary replacement of tensors in nested inputs by copies on one device.

    Tuples are replaced. Lists and dicts stay, so that they keep what forward writes to them.
    Tensors in objects of other classes are not moved: a cache has the tensors of all layers, and
    each layer needs only its own.

        made():      list [a on host, b on gpu:0]   ->   the same list [a', b] on gpu:0
        restore():   the same list [a, b]; written values of a' are copied to a

    Args:
        device: the device to which the tensors move.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._done: list[tuple[Callable[[], Any], Callable[[Any], None], Any, Any]] = []
        self._moved: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._wholes: dict[int, Tensor] = {}

    def moved(self, nest: Any) -> Any:
        """Return the nest with moved tensors: itself, or a new tuple.

        Args:
            nest: nested inputs.
        """
        tensors = list(_tensors_of(nest, ()))
        if all(devices.same(devices.location(tensor), self._device) for tensor in tensors):
            return nest
        self._wholes.update(_containing_tensors(tensors))
        return self._replace(nest, ())

    def _replace(self, nest: Any, above: tuple[int, ...]) -> Any:
        if isinstance(nest, Tensor):
            return self._tensor(nest)
        if not isinstance(nest, (tuple, list, dict)) or id(nest) in above:
            return nest
        above = (*above, id(nest))
        if isinstance(nest, tuple):
            _, children, assemble = container_parts(nest) or ([], [], tuple)
            items = [self._replace(child, above) for child in children]
            return nest if all(map(is_, items, children)) else assemble(items)
        for place, was in list(enumerate(nest) if isinstance(nest, list) else nest.items()):
            self._put(was, above, partial(_item, nest, place), partial(nest.__setitem__, place))
        return nest

    def _tensor(self, was: Tensor) -> Tensor:
        """Return the moved tensor, the same one for every occurrence."""
        if id(was) not in self._moved:
            whole = self._wholes.get(id(was), was)
            now = (
                devices.move(was, self._device)
                if whole is was
                else _moved_part(was, whole, self._tensor(whole))
            )
            if now is was:
                return was
            self._moved[id(was)] = was, now, devices.write_count(now)
        return self._moved[id(was)][1]

    def _put(
        self,
        was: Any,
        above: tuple[int, ...],
        read: Callable[[], Any],
        write: Callable[[Any], None],
    ) -> None:
        now = self._replace(was, above)
        if now is not was:
            write(now)
            self._done.append((read, write, was, now))

    def restore(self) -> None:
        """Restore the original tensors in place of the moved ones, with written values."""
        for was, now, writes in self._moved.values():
            if devices.write_count(now) != writes:
                _write(was, now)
        self._moved.clear()
        while self._done:
            read, write, was, now = self._done.pop()
            if read() is now:
                write(was)


def _tensors_of(nest: Any, above: tuple[int, ...]) -> Iterator[Tensor]:
    """Yield the tensors in tuples, lists and dicts."""
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, (tuple, list, dict)) and id(nest) not in above:
        for item in nest.values() if isinstance(nest, dict) else nest:
            yield from _tensors_of(item, (*above, id(nest)))


def _containing_tensors(tensors: Sequence[Any]) -> Iterator[tuple[int, Tensor]]:
    """Yield (identity of a tensor, the tensor that contains it) for tensors with common memory.

    Views must stay views of one moved tensor, so that a write to one is seen in the others. The
    containing tensor is one of the tensors or their base. It is no larger than all of them
    together, so that no additional memory is moved.
    """
    together: dict[int, dict[int, Tensor]] = defaultdict(dict)
    for tensor in tensors:
        if (
            isinstance(tensor, Tensor)
            and tensor.layout == torch.strided
            and not devices.is_transformed(tensor)
        ):
            together[tensor.untyped_storage()._cdata][id(tensor)] = tensor
    for parts in (list(found.values()) for found in together.values() if len(found) > 1):
        # The largest tensor is the only candidate to contain the others.
        bases = [part._base for part in parts if part._base is not None]
        whole = max([*parts, *bases], key=Tensor.numel)
        if whole.numel() <= sum(map(Tensor.numel, parts)) and all(
            _is_contained(part, whole) for part in parts
        ):
            yield from ((id(part), whole) for part in parts)


def _is_contained(part: Tensor, whole: Tensor) -> bool:
    """Return whether all elements of a tensor are elements of another one without gaps."""
    first = part.storage_offset() - whole.storage_offset()
    last = first + sum(
        (size - 1) * step for size, step in zip(part.shape, part.stride(), strict=True)
    )
    return (
        part.dtype == whole.dtype and whole.is_contiguous() and 0 <= first and last < whole.numel()
    )


def _moved_part(part: Tensor, whole: Tensor, moved: Tensor) -> Tensor:
    """Return the part of a moved tensor that corresponds to a part of the original.

    Args:
        part: the part.
        whole: the tensor that contains it.
        moved: the copy of ``whole``.
    """
    if moved is whole:
        return part
    related = part._base is not None and (part._base is whole or part._base is whole._base)
    if not related or part.requires_grad != whole.requires_grad:
        # No gradient flows between the two originals.
        moved = moved.detach()
    return moved.as_strided(
        part.shape, part.stride(), part.storage_offset() - whole.storage_offset()
    )


def _write(tensor: Tensor, value: Tensor) -> None:
    """Write a tensor's new value and gradient.

    Leaves that require a gradient are left alone: torch forbids forward to write to them.
    """
    if not (tensor.is_leaf and tensor.requires_grad):
        tensor.copy_(devices.move(value, devices.location(tensor)))


def _item(nest: Any, place: Any) -> Any:
    """Return the item; None if it is gone."""
    try:
        return nest[place]
    except (IndexError, KeyError):
        return None
