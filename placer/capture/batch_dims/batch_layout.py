"""Where the samples of a batch lie in its values, and how the values are cut into micro-batches.

inputs, BatchOptions ──▶ BatchLayout: number of samples, and for each tensor its batch dimension, or
None
                             └──▶ cut(): the values of each micro-batch

Values have names by which options refer to them: ``images``, ``targets.0.boxes``, ``logits``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from placer.capture import input_forms
from placer.capture.pytrees import Structure, flatten, flatten_inputs, parts_of
from placer.errors import InputError, kind_of
from placer.schema import BatchOptions
from placer.schema.batch_options import OTHERS, Cut, rule_for

_SHOWN = 12
"""Names in a message, at most: results such as caches have hundreds of values."""

DEFAULT = BatchOptions()
"""The options of a batch that nothing was declared of."""

_STEP = re.compile(r"\[(?:'((?:[^'\\]|\\.)*)'|\"([^\"]*)\"|([^\]]*))\]|\.(\w+)")
"""A step of a path in a nest, as ``Structure.paths`` has it: ``[0]``, ``['mask']``, ``.logits``."""


Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


class Part(NamedTuple):
    """The inputs of a micro-batch, or of a batch that is not cut.

    Attributes:
        tensors: flattened.
        inputs: their structure.
        dims: of each, the batch dimension; None where it has none.
    """

    tensors: list[Any]
    inputs: Structure
    dims: tuple[int | None, ...]


@dataclass(frozen=True)
class BatchLayout:
    """Where the samples of inputs, or of a target, lie.

    Attributes:
        size: number of samples.
        dims: of each tensor, the dimension that is the batch; None: every micro-batch has all of
            it.
        names: of the tensors.
        declared: of each tensor, whether the options name it.
        lists: the names of lists whose items are samples.
        packed: the name of a PackedSequence that would be cut; None if there is none.
        misfit: the message about a declaration that fits none of these values; empty if all fit. It
            may fit the values of another call. Therefore it is an error only where these values are
            cut or measured.
    """

    size: int
    dims: tuple[int | None, ...]
    names: tuple[str, ...]
    declared: tuple[bool, ...]
    lists: frozenset[str] = frozenset()
    packed: str | None = None
    misfit: str = ""

    def undeclared(self) -> list[int]:
        """Return the positions of the tensors that are cut although the options do not name them."""
        each = enumerate(zip(self.dims, self.declared, strict=True))
        return [place for place, (dim, named) in each if dim is not None and not named]

    def without(self, whole: Collection[int]) -> BatchLayout:
        """Return the layout that leaves these tensors whole, given by position."""
        return replace(
            self, dims=tuple(None if place in whole else dim for place, dim in enumerate(self.dims))
        )

    def described(self) -> str:
        """Return how the values are cut, for messages."""
        pairs = zip(self.names, self.dims, strict=True)
        cuts = [
            f"{name or 'the target'} along dimension {dim}"
            for name, dim in pairs
            if dim is not None
        ]
        cuts += [f"{name or 'the target'} by its items" for name in sorted(self.lists)]
        return (", ".join(cuts[:4]) + (", ..." if len(cuts) > 4 else "")) or "no value was cut"

    def cut(self, tensors: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
        """Return the tensors of each micro-batch, where no list has samples for items.

        Args:
            tensors: in the order of ``dims``.
            sizes: samples in each micro-batch.

        Raises:
            InputError: a tensor that is to be cut is sparse, or belongs to a PackedSequence; or a
                declaration fits none of the values.
        """
        self._refuse_to_cut(sizes)
        columns = [
            cut(*column, sizes) for column in zip(tensors, self.dims, self.names, strict=True)
        ]
        return [[column[index] for column in columns] for index in range(len(sizes))]

    def cut_call(self, call: Call, parameters: Parameters, sizes: Sequence[int]) -> list[Call]:
        """Return the arguments of each micro-batch, lists of samples cut by their items.

        Args:
            call: positional and keyword arguments.
            parameters: of the model's forward method.
            sizes: samples in each micro-batch.

        Raises:
            InputError: as ``cut``.
        """
        count = len(call[0])
        named = [list(part.items()) for part in self.cut_values(values_of(call, parameters), sizes)]
        return [(tuple(value for _, value in part[:count]), dict(part[count:])) for part in named]

    def cut_values(self, values: Mapping[str, Any], sizes: Sequence[int]) -> list[dict[str, Any]]:
        """Return the values of each micro-batch, lists of samples cut by their items.

        Args:
            values: nests of tensors, by name.
            sizes: samples in each micro-batch.

        Raises:
            InputError: as ``cut``.
        """
        self._refuse_to_cut(sizes)
        dims = {
            name: dim for name, dim in zip(self.names, self.dims, strict=True) if dim is not None
        }
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return [
            {name: self._slice(value, name, dims, start, size) for name, value in values.items()}
            for start, size in zip(starts, sizes, strict=True)
        ]

    def _slice(self, value: Any, name: str, dims: Mapping[str, int], start: int, size: int) -> Any:
        if name in self.lists:
            return type(value)(value[start : start + size])
        if isinstance(value, Tensor):
            return _strided(value, name).narrow(dims[name], start, size) if name in dims else value
        if not any(not name or one.startswith(f"{name}.") for one in (*self.lists, *dims)):
            return value
        labels, children, assemble = parts_of(value) or ([], [], lambda _: value)
        each = zip(labels, children, strict=True)
        return assemble(
            [self._slice(child, below(name, label), dims, start, size) for label, child in each]
        )

    def refuse_misfit(self) -> None:
        """Raise an InputError if a declaration fits none of the values."""
        if self.misfit:
            raise InputError(self.misfit)

    def _refuse_to_cut(self, sizes: Sequence[int]) -> None:
        if len(sizes) < 2:
            return
        self.refuse_misfit()
        if self.packed is not None:
            raise InputError(
                f"{self.packed or 'it'} is a PackedSequence, whose rows are steps of several samples, so that it "
                "cannot be cut into micro-batches; give the padded tensor and its lengths, or chunks=1"
            )


def cut(tensor: Any, dim: int | None, name: str, sizes: Sequence[int]) -> Sequence[Any]:
    """Return a tensor's part for each micro-batch.

    Args:
        tensor: the tensor.
        dim: the dimension to cut along; None: every part is the whole.
        name: of the tensor, for messages.
        sizes: samples in each micro-batch.

    Raises:
        InputError: the tensor is sparse.
    """
    if dim is None or len(sizes) == 1:
        return [tensor] * len(sizes)
    parts: Sequence[Any] = _strided(tensor, name).split(list(sizes), dim)  # type: ignore[no-untyped-call]
    return parts


class Parameters(NamedTuple):
    """The parameters of a model's forward method.

    Attributes:
        positional: names of the parameters that may be given by position.
        known: names of all parameters, without ``*args`` and ``**kwargs``.
        is_open: whether forward takes arguments of other names, too.
    """

    positional: tuple[str, ...] = ()
    known: frozenset[str] = frozenset()
    is_open: bool = True

    @classmethod
    def of(cls, module: nn.Module) -> Parameters:
        """Return the parameters of a module's forward method."""
        try:
            found = inspect.signature(module.forward).parameters.values()
        except (TypeError, ValueError):  # a scripted one tells no signature
            return cls()
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        open_kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        positional = tuple(one.name for one in found if one.kind in by_position)
        known = frozenset(one.name for one in found if one.kind not in open_kinds)
        return cls(positional, known, any(one.kind in open_kinds for one in found))

    def name_of(self, place: int) -> str:
        """Return the name of an argument that is given by position."""
        return self.positional[place] if place < len(self.positional) else str(place)

    def renamed(self, name: str) -> str:
        """Return a name that begins with a position as one that begins with a parameter."""
        first, dot, rest = name.partition(".")
        return f"{self.name_of(int(first))}{dot}{rest}" if first.isdecimal() else name


ANY = Parameters()
"""The parameters of a model that is not known."""


def values_of(call: Call, parameters: Parameters) -> dict[str, Any]:
    """Return a call's arguments by name, in their order."""
    return {parameters.name_of(place): one for place, one in enumerate(call[0])} | call[1]


def layout_of_inputs(
    call: Call,
    tensors: Sequence[Any],
    inputs: Structure,
    options: BatchOptions,
    parameters: Parameters,
) -> BatchLayout:
    """Return where the samples of a call's inputs lie.

    Args:
        call: positional and keyword arguments.
        tensors: the flattened inputs.
        inputs: their structure.
        options: what was declared.
        parameters: of the model's forward method.

    Raises:
        InputError: the options name an input that the model does not have, or inputs of unlike
            batches.
    """
    rules = {parameters.renamed(name): rule for name, rule in _rules(options.inputs).items()}
    names = [_input_name(path, parameters) for path in inputs.paths]
    values = values_of(call, parameters)
    absent = _absent(rules, values, parameters)
    layout = _layout(values, tensors, names, rules, None, "batch_options.inputs")
    return replace(
        layout, packed=_packed(inputs.key, values, layout), misfit=absent or layout.misfit
    )


def _absent(rules: Mapping[str, Cut], values: Mapping[str, Any], parameters: Parameters) -> str:
    """Return the message about a declared name that a call lacks; empty if it lacks none.

    Raises:
        InputError: forward has no such parameter, so that no other call can have the argument
            either.
    """
    for name in rules:
        first = name.partition(".")[0]
        if name == OTHERS or has_value(values, name):
            continue
        if first in values:
            if values[first] is not None:
                parts = names_in(values[first], first)
                return (
                    f"batch_options.inputs names {name!r}, which is not a part of {first!r}; "
                    f"there are {parts}. Correct the name, or leave it out for such inputs"
                )
        elif first not in parameters.known:
            known = ", ".join([*values] or sorted(parameters.known))
            message = (
                f"batch_options.inputs names {name!r}, which is not an input; there are {known}"
            )
            if not parameters.is_open:
                raise InputError(message)
            return f"{message}. Correct the name, or leave it out for such inputs"
    return ""


_MISSING = object()


def has_value(nest: Any, name: str) -> bool:
    """Return whether a nest has a value of this name, which may be None.

    Args:
        nest: tensors in any nest.
        name: with parts behind dots, as ``targets.0.boxes``.
    """
    return _value_in(nest, name) is not _MISSING


def _value_in(nest: Any, name: str) -> Any:
    """Return the value of this name in a nest, or ``_MISSING``."""
    if isinstance(nest, Tensor):  # its attributes are no parts of it
        return _MISSING
    labels, children, _ = parts_of(nest) or ([], [], None)
    for label, child in zip(labels, children, strict=True):
        one = name_of(label)
        if name == one:
            return child
        found = _value_in(child, name[len(one) + 1 :]) if name.startswith(f"{one}.") else _MISSING
        if found is not _MISSING:
            return found
    return _MISSING


def names_in(nest: Any, name: str = "") -> str:
    """Return the names of the tensors in a nest, for messages.

    Args:
        nest: tensors in any nest.
        name: of the nest itself.
    """
    found = [".".join(filter(None, (name, name_of(path)))) for path in flatten(nest)[1].paths]
    if not any(found):
        return "no values that have a name"
    return ", ".join(found[:_SHOWN]) + (", ..." if len(found) > _SHOWN else "")


def refuse_absent_outputs(options: BatchOptions, *nests: Any) -> None:
    """Raise an InputError if ``options.outputs`` names a value that does not exist.

    Args:
        options: of the batch.
        nests: the model's result, and the further values of the loss, if there is one.
    """
    if not isinstance(options.outputs, dict):
        return
    for name in options.outputs:
        if name != OTHERS and not any(has_value(nest, name) for nest in nests):
            known = [
                names_in(nest)
                for nest in nests
                if flatten(nest)[0] and not isinstance(nest, Tensor)
            ]
            there_are = (
                f"there are {', '.join(known)}"
                if known
                else "the result is one tensor, which outputs=0 declares"
            )
            raise InputError(
                f"batch_options.outputs names {name!r}, which is neither in the model's result nor "
                f"a value of loss_fn; {there_are}. Correct the name, or leave it out; declare a value of "
                "loss_fn as train_step(loss_fn, batch_options=...)"
            )


def refuse_no_options(options: Any) -> BatchOptions:
    """Return options, or raise an InputError if they are not BatchOptions."""
    if not isinstance(options, BatchOptions):
        raise InputError(
            f"batch_options is {kind_of(options)}; give placer.BatchOptions(...), or leave it out"
        )
    return options


def layout_of(
    model: nn.Module, inputs: Any, options: BatchOptions, name: str = "inputs"
) -> BatchLayout:
    """Return where the samples of inputs lie.

    Args:
        model: that takes them.
        inputs: one tensor, a tuple of positional or a dict of keyword arguments.
        options: what was declared.
        name: of the inputs, for messages.

    Raises:
        InputError: they are no inputs, or the options do not fit them.
    """
    call = input_forms.split(inputs, name)
    layout = layout_of_inputs(call, *flatten_inputs(*call), options, Parameters.of(model))
    layout.refuse_misfit()
    return layout


def layout_of_target(
    target: Any,
    leaves: Sequence[Any],
    structure: Structure,
    options: BatchOptions,
    size: int,
    known: dict[str, int] | None = None,
) -> BatchLayout:
    """Return where the samples of a target lie.

    Args:
        target: as the caller gave it.
        leaves: the same, flattened.
        structure: of the target.
        options: what was declared.
        size: number of samples in the inputs.
        known: the batch dimensions of earlier targets by name, of those in which no other dimension
            had the size. This target's are noted there.

    Raises:
        InputError: the options name a part that is not there, or a part is of another batch than
            the inputs.
    """
    names = [name_of(path) for path in structure.paths]
    if options.target == "auto":
        rules = _fitting(leaves, names, options, size, {} if known is None else known)
    else:
        rules = _rules(options.target)
    for name in rules:
        if name != OTHERS and not has_value(target, name):
            raise InputError(
                f"batch_options.target names {name!r}, which is not in the target; there are "
                f"{names_in(target)}"
            )
    layout = _layout({"": target}, leaves, names, rules, size, "batch_options.target")
    layout.refuse_misfit()
    for leaf, dim, name in zip(leaves, layout.dims, names, strict=True):
        rule = rule_for(name, rules, 0)[0]
        goes_whole = rule is None or any(_is_below(name, one) for one in layout.lists)
        if dim is None and not goes_whole and isinstance(leaf, Tensor) and leaf.dim():
            which = f"dimension {rule} of it" if rule else "its first dimension"
            raise InputError(
                f"a target{f' {name!r}' if name else ''} of shape {tuple(leaf.shape)} "
                f"goes with a batch of {size} samples; {which} must be the batch. Else declare it: "
                "BatchOptions(target=1) for another dimension, target='items' for a list "
                "of samples, target=None for what is not cut; or give chunks=1"
            )
    return replace(layout, packed=_packed(structure.key, {"": target}, layout))


def _fitting(
    leaves: Sequence[Any],
    names: Sequence[str],
    options: BatchOptions,
    size: int,
    known: dict[str, int],
) -> dict[str, Cut]:
    """Return for each tensor of a target a dimension whose size is the number of samples.

    By convention that is the first dimension. Where another dimension of the inputs is declared,
    targets may lie like the inputs, as (length, batch), or not, as (batch, length). Then any
    dimension of that size is taken: of several, the known dimension of earlier targets, or else the
    dimension of the inputs. The comparison of losses tells whether that was right.
    """
    given = options.inputs.values() if isinstance(options.inputs, Mapping) else [options.inputs]
    declared = [rule for rule in given if isinstance(rule, int)]
    along = declared[0] if declared and declared.count(declared[0]) == len(declared) else 0
    if isinstance(options.inputs, Mapping):
        others = options.inputs.get(OTHERS)
        along = others if isinstance(others, int) else along
    found: dict[str, Cut] = {}
    for name, leaf in zip(names, leaves, strict=True):
        fits = _dims_of_size(leaf, size)
        if not any(declared):
            fits = [dim for dim in fits if dim == 0]
        if fits:
            first = known.get(name, along)
            found[name or OTHERS] = first if first in fits else along if along in fits else fits[0]
        if len(fits) == 1:
            known[name] = fits[0]
    return found


def _dims_of_size(leaf: Any, size: int) -> list[int]:
    return (
        [dim for dim, length in enumerate(leaf.shape) if length == size]
        if isinstance(leaf, Tensor)
        else []
    )


def other_dims(leaves: Sequence[Any], layout: BatchLayout) -> list[tuple[int, int]]:
    """Return the other dimensions along which the tensors of a target could be cut.

    Args:
        leaves: of a target, flattened.
        layout: by which they are cut.

    Returns:
        Pairs of the position of a tensor and a dimension of the batch's size.
    """
    return [
        (place, other)
        for place, (leaf, dim) in enumerate(zip(leaves, layout.dims, strict=False))
        if dim is not None
        for other in _dims_of_size(leaf, layout.size)
        if other != dim
    ]


def spelt_target(options: BatchOptions, layout: BatchLayout, place: int, dim: int) -> str:
    """Return the declaration of another dimension for a tensor of a target.

    Args:
        options: that were given.
        layout: of the target.
        place: position of the tensor.
        dim: its batch dimension.
    """
    dims = {
        one: along for one, along in zip(layout.names, layout.dims, strict=True) if along
    }  # others are cut along 0
    target = dims | {layout.names[place]: dim} if layout.names[place] else dim
    inputs = "" if options.inputs == DEFAULT.inputs else f"inputs={options.inputs!r}, "
    return f"batch_options=BatchOptions({inputs}target={target!r})"


def name_of(path: str) -> str:
    """Return the name of a value in a result or target from its path: ``['loss'][0]`` is
    ``loss.0``.
    """
    return ".".join(next(filter(None, step.groups()), "") for step in _STEP.finditer(path))


def below(name: str, label: str) -> str:
    """Return the name of a part from the name of the whole and the part's label in it, such as
    ``[0]``.
    """
    return f"{name}.{name_of(label)}" if name else name_of(label)


def _rules(given: Cut | Mapping[str, Cut]) -> dict[str, Cut]:
    return dict(given) if isinstance(given, Mapping) else {OTHERS: given}


def _input_name(path: str, parameters: Parameters) -> str:
    """Return the name of an input from its path in ``(args, kwargs)``."""
    steps = name_of(path).split(".", 1)
    return parameters.renamed(steps[1]) if steps[0] == "0" else steps[1]


def _layout(
    values: Mapping[str, Any],
    leaves: Sequence[Any],
    names: Sequence[str],
    rules: Mapping[str, Cut],
    size: int | None,
    where: str,
) -> BatchLayout:
    found = [rule_for(name, rules, 0) for name in names]
    declared = [entry != OTHERS for _, entry in found]
    lists = {name: len(one) for value in values.items() for name, one in _lists(*value, rules)}
    misfit = _misfit(values, list(zip(leaves, names, strict=True)), rules, lists, where)
    each = list(zip(leaves, names, (rule for rule, _ in found), declared, strict=True))
    sizes = list(lists.items())
    # what was declared tells the size, wherever it stands
    for wanted in (True, False):
        for leaf, name, rule, named in each:
            inside = any(_is_below(name, one) for one in lists)
            if (
                named == wanted
                and isinstance(rule, int)
                and not inside
                and isinstance(leaf, Tensor)
            ):
                if leaf.dim() > rule:
                    sizes.append((name, int(leaf.shape[rule])))
                elif named:
                    raise InputError(
                        f"{where} says that dimension {rule} of {name!r} is the batch; it has shape {tuple(leaf.shape)}"
                    )
    if size is None:
        size = sizes[0][1] if sizes else 1
    for name, length in lists.items():
        if length != size:
            raise InputError(f"{name!r} is a list of {length} samples, and the batch has {size}")
    dims: list[int | None] = []
    for leaf, name, rule, named in each:
        inside = any(_is_below(name, one) for one in lists)
        fits = (
            isinstance(rule, int) and not inside and isinstance(leaf, Tensor) and leaf.dim() > rule
        )
        if fits and leaf.shape[rule] == size:
            dims.append(rule)  # type: ignore[arg-type]
        elif fits and named:
            raise InputError(
                f"{name!r} has shape {tuple(leaf.shape)}, {leaf.shape[rule]} along dimension {rule}, which {where} "
                f"says is the batch; the batch has {size} samples"
            )
        else:
            dims.append(None)
    return BatchLayout(
        size, tuple(dims), tuple(names), tuple(declared), frozenset(lists), misfit=misfit
    )


def _misfit(
    values: Mapping[str, Any],
    leaves: Sequence[tuple[Any, str]],
    rules: Mapping[str, Cut],
    lists: Collection[str],
    where: str,
) -> str:
    """Return the message about a declaration that fits none of the values; empty if all fit.

    Args:
        values: nests of tensors, by name.
        leaves: their tensors, each with its name.
        rules: the declarations, by name.
        lists: names of the lists whose items are samples.
        where: the option that holds the declarations.

    Raises:
        InputError: a value whose items are declared as samples is a tensor, not a list.
    """
    nest = values.get("", values)
    for name, rule in rules.items():
        given = _value_in(nest, name) if name != OTHERS else None
        if given is None or given is _MISSING:
            continue
        if rule == "items" and not any(_is_below(one, name) for one in lists):
            what = (
                f"a tensor of shape {tuple(given.shape)}"
                if isinstance(given, Tensor)
                else kind_of(given)
            )
            raise InputError(
                f"{where} says that the items of {name!r} are samples; it is {what}, not a list"
            )
        if isinstance(rule, int) and _is_plain(given):
            is_nest = isinstance(given, (list, tuple, dict))
            ways_out = "leave it out, or give None" + (
                ", or 'items' for a list of samples" if is_nest else ""
            )
            return (
                f"{where} says that dimension {rule} of {name!r} is the batch; it is "
                f"{kind_of(given)}"
                f"{' without tensors' if is_nest else ', which has no dimensions'}; {ways_out}"
            )
    rule, others = (
        rules.get(OTHERS),
        [(leaf, name) for leaf, name in leaves if rule_for(name, rules, 0)[1] == OTHERS],
    )
    outside = [
        (leaf, name) for leaf, name in others if not any(_is_below(name, one) for one in lists)
    ]
    shapes = {
        name: tuple(leaf.shape) for leaf, name in outside if isinstance(leaf, Tensor) and leaf.dim()
    }
    if not shapes or rule is None:
        return ""
    most = max(map(len, shapes.values()))
    shown = ", ".join(
        f"{name or 'it'} has shape {shape}" for name, shape in list(shapes.items())[:_SHOWN]
    )
    if isinstance(rule, int) and rule >= most:
        return (
            f"{where} says that dimension {rule} is the batch, and no tensor has so many "
            f"dimensions: {shown}; give a dimension from 0 to {most - 1}, None for what is "
            "not cut, or one of these for each name"
        )
    if rule == "items" and len(others) == len(outside):
        return (
            f"{where} says that the items of lists are samples, and there is no list: {shown}; "
            "give a dimension, None for what is not cut, or one of these for each name"
        )
    return ""


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number or a string, or a nest that has nothing else."""
    if isinstance(value, (list, tuple, dict)):
        items = list(value.values() if isinstance(value, dict) else value)
        return bool(items) and all(map(_is_plain, items))
    return isinstance(value, (bool, int, float, complex, str, bytes))


def _lists(name: str, value: Any, rules: Mapping[str, Cut]) -> Iterator[tuple[str, Any]]:
    """Yield the outermost lists whose items are samples, with their names."""
    if "items" not in rules.values() or isinstance(value, Tensor):
        return
    if (
        isinstance(value, (list, tuple))
        and not hasattr(value, "_fields")
        and rule_for(name, rules, 0)[0] == "items"
    ):
        yield name, value
        return
    for label, child in zip(*(parts_of(value) or ((), ()))[:2], strict=True):
        yield from _lists(below(name, label), child, rules)


def _is_below(name: str, above: str) -> bool:
    return not above or name == above or name.startswith(f"{above}.")


def _packed(key: Hashable, values: Mapping[str, Any], layout: BatchLayout) -> str | None:
    """Return the name of a PackedSequence that would be cut."""
    if not _has_packed(key):
        return None
    cuts = [name for name, dim in zip(layout.names, layout.dims, strict=True) if dim is not None]
    waiting = list(values.items())
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, PackedSequence) and any(_is_below(one, name) for one in cuts):
            return name
        if not isinstance(value, (Tensor, PackedSequence)):
            labels, children, _ = parts_of(value) or ([], [], None)
            waiting += [
                (below(name, label), child) for label, child in zip(labels, children, strict=True)
            ]
    return None


def _has_packed(key: Hashable) -> bool:
    return key is PackedSequence or (isinstance(key, tuple) and any(map(_has_packed, key)))


def _strided(tensor: Tensor, name: str) -> Tensor:
    if tensor.layout != torch.strided:
        raise InputError(
            f"{name or 'a tensor'} of shape {tuple(tensor.shape)} is {tensor.layout}, which cannot be cut into "
            "micro-batches; give it as .to_dense(), or chunks=1"
        )
    return tensor
