"""What a model's code is given by a caller, whose lists, dicts and objects it may write into.

cache.update(keys)          # an object takes other tensors: a graph returns them, and the call puts them there
kept[:, place] = x          # a tensor takes other values: the graph works on a copy, and returns that
states.append(x)            # on the way through hooks the list is the caller's own, with its tensors moved for a while
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
from placer.capture.grouping import storage_roots, written
from placer.capture.pytrees import (
    CONSTANTS,
    NUMBERS,
    Structure,
    attributes_of,
    flatten_inputs,
    holds_nothing,
    parts_of,
)


@dataclass(frozen=True)
class Left:
    """What forward left in what it was given, where that is something else: its tensors come behind
    the results.

    Attributes:
        structure: of ``(args, kwargs)`` afterwards.
        sources: for each tensor in it, its place among those given and then those made.
        written: places of tensors that were given and written to, with the places of their values
            among those made.
        paths: where each that was made stands, for messages.
    """

    structure: Structure
    sources: tuple[int, ...]
    written: tuple[tuple[int, int], ...]
    paths: tuple[str, ...]

    def give_back(self, nest: Any, given: Sequence[Any], made: Sequence[Any]) -> None:
        """Write it into what the caller gave.

        Args:
            nest: ``(args, kwargs)``.
            given: the tensors in it.
            made: what the graph gave behind the results.
        """
        for place, value in self.written:
            _write(given[place], made[value])
        tensors = [*given, *made]
        give_back(nest, self.structure.unflatten([tensors[place] for place in self.sources]))


def left_in(
    nest: Any, given: Sequence[Any], inputs: Structure, copied: set[int]
) -> tuple[list[Any], Left | None]:
    """What forward made and left in what it was given.

    Args:
        nest: ``(args, kwargs)``, as forward left them.
        given: the tensors that were in them.
        inputs: their structure before.
        copied: the places of those that were copies, as forward writes to them.

    Returns:
        What it made, and where that goes; nothing and None if it left all as it was.
    """
    leaves, after = flatten_inputs(*nest)
    places = {id(tensor): place for place, tensor in enumerate(given)}
    as_before = [places.get(id(leaf)) for leaf in leaves] == list(range(len(given)))
    if after.key == inputs.key and as_before and not copied:
        return [], None
    written = tuple((place, index) for index, place in enumerate(sorted(copied)))
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
    return made, Left(after, tuple(sources), written, tuple(paths))


def written_inputs(graph: fx.Graph) -> set[int]:
    """The places of the inputs that the graph writes to."""
    operations = [node for node in graph.nodes if node.op == "call_function"]
    writes = [target for node in operations for target in written(node)]
    if not writes:
        return set()
    roots = storage_roots(operations)
    family = {root for target in writes for root in roots.get(target, {target})}
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return {place for place, node in enumerate(inputs) if node in family}


def give_back(nest: Any, after: Any) -> Any:
    """Let the lists, dicts and objects of a nest hold what those of another one in their places
    hold.

    Args:
        nest: what a caller gave.
        after: a copy of it, into which forward may have written.

    Returns:
        The nest, or what stands for it: of tuples another one, of anything else what is there
        after.
    """
    if (
        nest is after
        or type(nest) is not type(after)
        or isinstance(nest, (Tensor, *CONSTANTS, *NUMBERS))
    ):
        return after
    if holds_nothing(nest):
        return after
    if isinstance(nest, tuple):
        _, children, assemble = parts_of(nest) or ([], [], tuple)
        items = list(map(give_back, children, after))
        return (
            nest if len(nest) == len(after) and all(map(is_, items, children)) else assemble(items)
        )
    if isinstance(nest, list):
        items = [*map(give_back, nest, after), *after[len(nest) :]]
        if len(items) != len(nest) or not all(map(is_, items, nest)):
            nest[:] = items
    elif isinstance(nest, dict):
        for key in [key for key in nest if key not in after]:
            del nest[key]
        for key, value in after.items():
            held = give_back(nest[key], value) if key in nest else value
            if key not in nest or held is not nest[key]:
                nest[key] = held
    else:
        had, has = dict(attributes_of(nest) or {}), attributes_of(after) or {}
        for name in had.keys() - has.keys():
            object.__delattr__(nest, name)
        for name, value in has.items():
            held = give_back(had[name], value) if name in had else value
            if name not in had or held is not had[name]:
                object.__setattr__(nest, name, held)
    return nest


class Exchange:
    """Tensors on one device take the places of others, for a while.

    Tuples are made anew; lists and dicts stay the same ones, so that what is written to them stays
    there. What objects of other classes hold stays where it is: a cache has the tensors of all
    layers, of which one needs its own.

    Args:
        device: where all that is handed on is to be.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._done: list[tuple[Callable[[], Any], Callable[[Any], None], Any, Any]] = []
        self._moved: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._wholes: dict[int, Tensor] = {}

    def made(self, nest: Any) -> Any:
        """The nest, or, of tuples, another one with the same parts."""
        tensors = list(_tensors_of(nest, ()))
        if all(devices.same(devices.location(tensor), self._device) for tensor in tensors):
            return nest
        self._wholes.update(_wholes(tensors))
        return self._made(nest, ())

    def _made(self, nest: Any, above: tuple[int, ...]) -> Any:
        if isinstance(nest, Tensor):
            return self._tensor(nest)
        if not isinstance(nest, (tuple, list, dict)) or id(nest) in above:
            return nest
        above = (*above, id(nest))
        if isinstance(nest, tuple):
            _, children, assemble = parts_of(nest) or ([], [], tuple)
            items = [self._made(child, above) for child in children]
            return nest if all(map(is_, items, children)) else assemble(items)
        for place, was in list(enumerate(nest) if isinstance(nest, list) else nest.items()):
            self._put(was, above, partial(_item, nest, place), partial(nest.__setitem__, place))
        return nest

    def _tensor(self, was: Tensor) -> Tensor:
        """The one that takes its place, the same wherever it is."""
        if id(was) not in self._moved:
            whole = self._wholes.get(id(was), was)
            now = (
                devices.move(was, self._device)
                if whole is was
                else _part(was, whole, self._tensor(whole))
            )
            if now is was:
                return was
            self._moved[id(was)] = was, now, _writes(now)
        return self._moved[id(was)][1]

    def _put(
        self,
        was: Any,
        above: tuple[int, ...],
        read: Callable[[], Any],
        write: Callable[[Any], None],
    ) -> None:
        now = self._made(was, above)
        if now is not was:
            write(now)
            self._done.append((read, write, was, now))

    def put_back(self) -> None:
        """Give every tensor that is still in another's place that place back, with what was written
        to the other.
        """
        for was, now, writes in self._moved.values():
            if _writes(now) != writes:
                _write(was, now)
        self._moved.clear()
        while self._done:
            read, write, was, now = self._done.pop()
            if read() is now:
                write(was)


def _tensors_of(nest: Any, above: tuple[int, ...]) -> Iterator[Tensor]:
    """The tensors in tuples, lists and dicts."""
    if isinstance(nest, Tensor):
        yield nest
    elif isinstance(nest, (tuple, list, dict)) and id(nest) not in above:
        for item in nest.values() if isinstance(nest, dict) else nest:
            yield from _tensors_of(item, (*above, id(nest)))


def _wholes(tensors: Sequence[Any]) -> Iterator[tuple[int, Tensor]]:
    """For each tensor that lies in another one, or in what both are parts of: which that is.

    What is written to the one is then seen in the other. That is itself one of the tensors, or no
    larger than they are together, so that no more is moved than without it.
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
        bases = [part._base for part in parts if part._base is not None]
        whole = max([*parts, *bases], key=Tensor.numel)
        if whole.numel() <= sum(map(Tensor.numel, parts)) and all(
            _lies_in(part, whole) for part in parts
        ):
            yield from ((id(part), whole) for part in parts)


def _lies_in(part: Tensor, whole: Tensor) -> bool:
    """Whether the elements of the one are elements of the other, which has no gaps."""
    first = part.storage_offset() - whole.storage_offset()
    last = first + sum(
        (size - 1) * step for size, step in zip(part.shape, part.stride(), strict=True)
    )
    return (
        part.dtype == whole.dtype and whole.is_contiguous() and 0 <= first and last < whole.numel()
    )


def _part(part: Tensor, whole: Tensor, moved: Tensor) -> Tensor:
    """What a tensor is to another one that it lies in, of a copy of that."""
    if moved is whole:
        return part
    related = part._base is not None and (part._base is whole or part._base is whole._base)
    if not related or part.requires_grad != whole.requires_grad:
        moved = moved.detach()  # no gradient flows from the one to the other
    return moved.as_strided(
        part.shape, part.stride(), part.storage_offset() - whole.storage_offset()
    )


def _write(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor other values, and their gradients; none to a leaf that has one, as torch lets
    no forward do.
    """
    if not (tensor.is_leaf and tensor.requires_grad):
        tensor.copy_(devices.move(value, devices.location(tensor)))


def _writes(tensor: Tensor) -> int:
    """How often a tensor was written to; of one of inference mode nobody counts that."""
    return 0 if tensor.is_inference() else tensor._version


def _item(nest: Any, place: Any) -> Any:
    """What is there; None where it is gone."""
    try:
        return nest[place]
    except (IndexError, KeyError):
        return None
