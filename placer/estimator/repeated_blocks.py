"""Models with many equal blocks, estimated from a model with few of them.

    model of 32 blocks ──▶ model of 9 blocks ──▶ captured profile of 9 ──▶ profile of 32

A capture takes time in proportion to the blocks. One run on ``meta`` with each number of blocks
shows whether the left out blocks run the same operations on the same values as their neighbours.
Where they do not, the whole model is captured.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from placer.capture.granularity import LARGE_TIME
from placer.capture.pytrees import flatten
from placer.estimator.meta_models import meta_copy
from placer.schema import Edge, Layer, Profile
from placer.schema.base import MERGED

FEWEST_BLOCKS = int(1 / LARGE_TIME) + 1
"""Blocks of the short model: a block's share stays so small that granularity "auto" does not open
it, as in the whole model."""

FEWEST_LEFT_OUT = 4
"""With fewer blocks to leave out, the runs on ``meta`` take longer than they save."""

Operation = tuple[Any, ...]


class ShortModel(NamedTuple):
    """A copy of a model, on ``meta``, with its first blocks only.

    Attributes:
        module: the copy.
        blocks: the path of the container of the blocks.
        kept: the number of blocks in the copy.
        whole: the number of blocks in the model.
    """

    module: nn.Module
    blocks: str
    kept: int
    whole: int


def short_model(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> ShortModel | None:
    """Return a copy with few blocks; None if the model has no such copy.

    Args:
        model: the model, in the mode to estimate.
        args: its positional inputs.
        kwargs: its keyword inputs.
    """
    path, whole = _longest_container(model)
    if whole < FEWEST_BLOCKS + FEWEST_LEFT_OUT or not _is_on_meta(model):
        return None
    try:
        copied = meta_copy(model)
        blocks = _container(copied, path)
        if len({_built(block) for block in blocks}) > 1:
            return None
        before = _trace(copied, blocks, args, kwargs)
        if not before.is_uniform():
            return None
        del blocks[FEWEST_BLOCKS:]
        after = _trace(copied, blocks, args, kwargs)
    except Exception:  # the user's code may need values, or another number of blocks
        return None
    if after.rows != [*before.rows[: FEWEST_BLOCKS - 1], before.rows[-1]]:
        return None
    if (after.before, after.after) != (before.before, before.after):
        return None
    return ShortModel(copied, path, FEWEST_BLOCKS, whole)


def whole_profile(profile: Profile, short: ShortModel) -> Profile | None:
    """Return the profile with all blocks; None if the blocks in it are not alike.

    Args:
        profile: of the short model.
        short: the short model.
    """
    try:
        return _Stretch(profile, short).profile()
    except _UnlikeError:
        return None


class _UnlikeError(Exception):
    """The blocks of a profile cannot be repeated."""


def _longest_container(model: nn.Module) -> tuple[str, int]:
    lengths = {
        path: len(module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
    }
    return max(lengths.items(), key=lambda item: item[1], default=("", 0))


def _container(model: nn.Module, path: str) -> nn.ModuleList | nn.Sequential:
    found = model.get_submodule(path)
    assert isinstance(found, nn.ModuleList | nn.Sequential)
    return found


def _is_on_meta(model: nn.Module) -> bool:
    return all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def _built(block: nn.Module) -> tuple[Any, ...]:
    """Return the classes, parameters and buffers of a block."""
    modules = tuple((name, type(module)) for name, module in block.named_modules())
    tensors = (*block.named_parameters(), *block.named_buffers())
    return modules, tuple(
        (name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors
    )


@dataclass
class _Trace:
    """The operations of one run.

    Attributes:
        before: operations before the first block.
        rows: operations of each block, and of the model after it and before the next block.
        after: operations after the last block.
        is_chain: whether each block reads only itself, the block before it, and what ran before all
            blocks; and the rest and the results only the last block.
    """

    before: list[Operation] = field(default_factory=list)
    rows: list[list[Operation]] = field(default_factory=list)
    after: list[Operation] = field(default_factory=list)
    is_chain: bool = True

    def is_uniform(self) -> bool:
        """Return whether all blocks but the first run the same operations."""
        # the first block reads the embedding, and no operations lie between the last and the next
        _, *inner, last = self.rows
        alike = all(row == inner[0] for row in inner)
        return self.is_chain and alike and inner[0][: len(last)] == last


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations such that equal operations of different blocks are equal."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = _Trace()
        self._segment = -1  # number of the block; -1 before all of them
        self._count = len(blocks)
        self._row = self.trace.before
        self._made: dict[int, tuple[int, int]] = {}
        self._kept: list[Tensor] = []  # an id is unique as long as its tensor exists
        self._state: dict[int, tuple[str, int | None]] = {
            id(tensor): (name, None)
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        }
        self._state |= {
            id(tensor): (name, number)
            for number, block in enumerate(blocks)
            for name, tensor in (*block.named_parameters(), *block.named_buffers())
        }

    def enter(self, number: int) -> None:
        """Begin a block."""
        if number != self._segment + 1:
            raise _UnlikeError("blocks run in another order")
        self._segment, self._row = number, []
        self.trace.rows.append(self._row)

    def leave(self, number: int) -> None:
        """End a block."""
        if number == self._count - 1:
            self._segment, self._row = self._count, self.trace.after

    def finish(self, results: Sequence[Any]) -> None:
        """Record where the results of the model were made."""
        self.trace.after.append(tuple(map(self._told, results)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.prim.device.default:  # a read of ``tensor.device``
            return result
        reads = [self._told(leaf) for leaf in _leaves((args, kwargs))]
        made = [leaf for leaf in _leaves(result) if isinstance(leaf, Tensor)]
        self._row.append((func, torch.is_grad_enabled(), *reads, *map(_facts, made)))
        for place, tensor in enumerate(made):
            self._kept.append(tensor)
            self._made[id(tensor)] = (self._segment, 64 * len(self._row) + place)
        return result

    def _told(self, leaf: Any) -> Any:
        """Return what is compared of an operand: where a tensor was made, or the value."""
        if not isinstance(leaf, Tensor):
            return repr(leaf)
        if id(leaf) in self._made:
            segment, place = self._made[id(leaf)]
            if segment == -1:
                return ("before", place, _facts(leaf))
            if segment < self._segment - 1:
                self.trace.is_chain = False
            return (self._segment - segment, place, _facts(leaf))
        name, block = self._state.get(id(leaf), ("", None))
        if block is not None and block != self._segment:
            self.trace.is_chain = False
        return (name, block is None, _facts(leaf))


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the operands in the arguments of an operation."""
    if isinstance(value, tuple | list):
        for one in value:
            yield from _leaves(one)
    elif isinstance(value, dict):
        for name, one in value.items():
            yield name
            yield from _leaves(one)
    else:
        yield value


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.stride(), tensor.requires_grad


def _trace(
    model: nn.Module,
    blocks: nn.ModuleList | nn.Sequential,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> _Trace:
    leaves, structure = flatten((tuple(args), dict(kwargs)))
    recorder = _Recorder(model, list(blocks))
    fake = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)
    with _told_of_blocks(recorder, blocks), _unlogged_failures(), fake:
        args, kwargs = structure.unflatten(
            [
                torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device="meta")
                if isinstance(leaf, Tensor)
                else leaf
                for leaf in leaves
            ]
        )
        with recorder:
            result = model(*args, **kwargs)
        recorder.finish(flatten(result)[0])
    if len(recorder.trace.rows) < len(blocks):
        raise _UnlikeError("not all blocks run")
    return recorder.trace


@contextmanager
def _unlogged_failures() -> Iterator[None]:
    """Keep torch from printing the traceback of an operation that fails on fake tensors.

    The model is then captured as a whole, and capture reports what the user has to know.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def _told_of_blocks(recorder: _Recorder, blocks: nn.ModuleList | nn.Sequential) -> Iterator[None]:
    with ExitStack() as hooks:
        for number, block in enumerate(blocks):
            enter = block.register_forward_pre_hook(lambda *_, n=number: recorder.enter(n))
            leave = block.register_forward_hook(lambda *_, n=number: recorder.leave(n))
            hooks.callback(enter.remove)
            hooks.callback(leave.remove)
        yield


class _Place(NamedTuple):
    """A layer by its block: None outside of the blocks, and then with its full name."""

    block: int | None
    name: str


class _Stretch:
    """Repeats blocks in the middle of a profile."""

    def __init__(self, profile: Profile, short: ShortModel) -> None:
        self._profile = profile
        self._prefix = f"{short.blocks}." if short.blocks else ""
        self._short = short
        self._more = short.whole - short.kept
        self._pivot = short.kept // 2  # the block that the repeated ones follow
        self._layers = defaultdict[int | None, list[Layer]](list)
        for layer in profile.layers:
            self._layers[self._place(layer.name).block].append(layer)
        self._edges = defaultdict[str, list[Edge]](list)
        for edge in profile.edges:
            self._edges[edge.source].append(edge)

    def profile(self) -> Profile:
        """Return the profile with all blocks.

        Raises:
            _UnlikeError: the profile's blocks are not alike.
        """
        self._refuse_other_order()
        self._refuse_unlike_blocks()
        before = sum(1 for _ in self._outside_before())
        outside = self._layers[None]
        layers = [*outside[:before]]
        edges = [self._long_edge(edge) for one in layers for edge in self._edges[one.name]]
        for layer in self._layers[0]:
            layers.append(layer)
            edges += map(self._long_edge, self._edges[layer.name])
        for block in range(1, self._short.whole):
            more_layers, more_edges = self._copy(self._model(block), block)
            layers += more_layers
            edges += more_edges
        layers += outside[before:]
        edges += [edge for one in outside[before:] for edge in self._edges[one.name]]
        return self._profile.model_copy(
            update={"layers": tuple(layers), "edges": tuple(edges), "graph_hash": ""}
        )

    def _outside_before(self) -> Iterator[Layer]:
        for layer in self._profile.layers:
            if self._place(layer.name).block is not None:
                return
            yield layer

    def _refuse_other_order(self) -> None:
        numbers = [self._place(layer.name).block for layer in self._profile.layers]
        inside = [number for number in numbers if number is not None]
        if not inside or sorted({*inside}) != [*range(self._short.kept)]:
            raise _UnlikeError("a block has no layer of its own")
        first = numbers.index(inside[0])
        if inside != sorted(inside) or numbers[first : first + len(inside)] != inside:
            raise _UnlikeError("other layers lie between the blocks")

    def _refuse_unlike_blocks(self) -> None:
        profile = self._profile
        shared = (*profile.colocated, *(tie.layers for tie in profile.tied))
        if any(self._place(name).block is not None for group in shared for name in group):
            raise _UnlikeError("a block shares parameters")
        first = (*self._outside_before(), *self._layers[0])
        outside = [edge for layer in first for edge in self._edges[layer.name]]
        for block in range(2, self._short.kept - 2):
            if self._copy(block, block + 1) != self._copy(block + 1, block + 1):
                raise _UnlikeError("blocks have other layers or edges")
            for edge in outside:
                for names in (edge.targets, edge.saved_by):
                    if self._within(names, block) != self._within(names, block + 1):
                        raise _UnlikeError("blocks read other values")

    def _within(self, names: Sequence[str], block: int) -> list[str]:
        places = map(self._place, names)
        return [place.name for place in places if place.block == block]

    def _model(self, block: int) -> int:
        """Return the block of the profile that a block of the whole model equals."""
        if block <= self._pivot:
            return block
        return max(self._pivot, block - self._more)

    def _copy(self, model: int, block: int) -> tuple[list[Layer], list[Edge]]:
        """Return the layers of a block of the profile and the edges from it, for another block."""
        layers, edges = [], []
        for layer in self._layers[model]:
            name = self._renamed(layer.name, block - model)
            layers.append(layer.model_copy(update={"name": name}))
            edges += [self._block_edge(edge, model, block) for edge in self._edges[layer.name]]
        return layers, edges

    def _block_edge(self, edge: Edge, model: int, block: int) -> Edge:
        places = [self._place(name).block for name in edge.targets]
        for place in places:
            is_near = place in (model, model + 1) or (
                place is None and model == self._short.kept - 1
            )
            if not is_near:
                raise _UnlikeError("a block's value is read by a later layer than the next block")
        moved = block - model
        return edge.model_copy(
            update={
                "source": self._renamed(edge.source, moved),
                "targets": tuple(self._renamed(name, moved) for name in edge.targets),
                "saved_by": tuple(self._renamed(name, moved) for name in edge.saved_by),
                "retained_until": self._renamed(edge.retained_until, moved),
            }
        )

    def _long_edge(self, edge: Edge) -> Edge:
        """Return an edge from before the second block with the readers in all blocks.

        What the model computes before all blocks may belong to the first block.
        """
        until = self._place(edge.retained_until).block
        moved = self._more if until is not None and until > self._pivot else 0
        return edge.model_copy(
            update={
                "targets": self._in_all_blocks(edge.targets),
                "saved_by": self._in_all_blocks(edge.saved_by),
                "retained_until": self._renamed(edge.retained_until, moved),
            }
        )

    def _in_all_blocks(self, names: Sequence[str]) -> tuple[str, ...]:
        by_block = defaultdict[int | None, list[str]](list)
        for name in names:
            by_block[self._place(name).block].append(name)
        inside = [
            self._renamed(name, block - model)
            for block in range(self._short.whole)
            for model in (self._model(block),)
            for name in by_block[model]
        ]
        outside = by_block[None]
        start = {layer.name for layer in self._outside_before()}
        return (
            *(name for name in outside if name in start),
            *inside,
            *(name for name in outside if name not in start),
        )

    def _renamed(self, name: str, moved: int) -> str:
        """Return the name of a layer with another number of its block."""
        place = self._place(name)
        if place.block is None:
            return name
        old, new = (f"{self._prefix}{number}" for number in (place.block, place.block + moved))
        return MERGED.join(f"{new}{part[len(old) :]}" for part in name.split(MERGED))

    def _place(self, name: str) -> _Place:
        places = {self._part(part) for part in name.split(MERGED)}
        numbers = {number for number, _ in places}
        if len(numbers) > 1:
            raise _UnlikeError("a layer has parts of several blocks")
        return _Place(
            numbers.pop(), MERGED.join(rest for _, rest in map(self._part, name.split(MERGED)))
        )

    def _part(self, name: str) -> tuple[int | None, str]:
        rest = name.removeprefix(self._prefix)
        number = re.match(r"\d+(?=$|[.@])", rest)
        if number is None or not name.startswith(self._prefix):
            return None, name
        return int(number[0]), rest[number.end() :]
