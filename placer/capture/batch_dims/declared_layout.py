"""Batch layouts from the user's declarations, and checks of these declarations.

    BatchOptions(inputs=..., target=...)
      0, 1, ...             every tensor is cut along this dimension, where its size is the batch's
      "items"               lists are cut by their items
      None                  nothing is cut
      {name: one of these}  one declaration for each name; ``"*"`` stands for all other names

Without a declaration, tensors are cut along dimension 0.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from placer.capture import input_forms
from placer.capture.batch_dims.batch_layout import BatchLayout, Call, Parameters, call_values
from placer.capture.batch_dims.value_names import (
    MAX_NAMES,
    MISSING,
    has_value,
    name_from_path,
    name_of_part,
    names_in,
    value_named,
)
from placer.capture.pytrees import Structure, container_parts, flatten, flatten_inputs
from placer.errors import InputError, kind_of
from placer.schema import BatchOptions
from placer.schema.base import is_part
from placer.schema.options import OTHERS, Cut, rule_for

DEFAULT_OPTIONS = BatchOptions()
"""The options if the user declared nothing."""


def call_layout(
    call: Call,
    tensors: Sequence[Any],
    inputs: Structure,
    options: BatchOptions,
    parameters: Parameters,
) -> BatchLayout:
    """Return the positions of the samples in a call's inputs.

    Args:
        call: positional and keyword arguments.
        tensors: the flattened inputs.
        inputs: their structure.
        options: the user's declarations.
        parameters: of the model's forward method.

    Raises:
        InputError: the options name an input that the model does not have, or inputs have batches
            of different sizes.
    """
    rules = {parameters.renamed(name): rule for name, rule in _rules(options.inputs).items()}
    names = [_input_name(path, parameters) for path in inputs.paths]
    values = call_values(call, parameters)
    absent = _absent(rules, values, parameters)
    layout = _layout(values, tensors, names, rules, None, "batch_options.inputs")
    return replace(
        layout,
        packed=_cut_packed_sequence(inputs.key, values, layout),
        misfit=absent or layout.misfit,
    )


def _absent(rules: Mapping[str, Cut], values: Mapping[str, Any], parameters: Parameters) -> str:
    """Return the message about a declared name that a call lacks; empty if it lacks none.

    Raises:
        InputError: forward has no such parameter, so no other call can have the argument either.
    """
    for name in rules:
        first = name.partition(".")[0]
        if name == OTHERS or has_value(values, name):
            continue
        if first in values:
            if values[first] is not None:
                parts = names_in(values[first], first)
                return (
                    f"batch_options.inputs names {name!r}, which is not a part of {first!r} "
                    f"(parts: {parts}). Correct the name, or leave it out for such inputs"
                )
        elif first not in parameters.known:
            known = ", ".join([*values] or sorted(parameters.known))
            message = (
                f"batch_options.inputs names {name!r}, which is not an input (inputs: {known})"
            )
            if not parameters.is_open:
                raise InputError(message)
            return f"{message}. Correct the name, or leave it out for such inputs"
    return ""


def refuse_absent_outputs(options: BatchOptions, *nests: Any) -> None:
    """Raise an InputError if ``options.outputs`` names a value that does not exist.

    Args:
        options: of the batch.
        nests: the model's result, and the further values of the loss if there is one.
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
            values = (
                f"values: {', '.join(known)}"
                if known
                else "the result is one tensor, which outputs=0 declares"
            )
            raise InputError(
                f"batch_options.outputs names {name!r}, which is neither in the model's result nor "
                f"a value of loss_fn ({values}). Correct the name, or leave it out; declare a "
                "value of loss_fn as train_step(loss_fn, batch_options=...)"
            )


def require_batch_options(options: Any) -> BatchOptions:
    """Return options, or raise an InputError if they are not BatchOptions."""
    if not isinstance(options, BatchOptions):
        raise InputError(
            f"batch_options is {kind_of(options)}; give placer.BatchOptions(...), or leave it out"
        )
    return options


def input_layout(
    model: nn.Module, inputs: Any, options: BatchOptions, name: str = "inputs"
) -> BatchLayout:
    """Return the positions of the samples in inputs.

    Args:
        model: the model that takes them.
        inputs: one tensor, a tuple of positional arguments or a dict of keyword arguments.
        options: the user's declarations.
        name: of the inputs, for messages.

    Raises:
        InputError: the inputs have no valid form, or the options do not fit them.
    """
    call = input_forms.call_arguments(inputs, name)
    layout = call_layout(call, *flatten_inputs(*call), options, Parameters.from_module(model))
    layout.refuse_misfit()
    return layout


def target_layout(
    target: Any,
    leaves: Sequence[Any],
    structure: Structure,
    options: BatchOptions,
    size: int,
    known: dict[str, int] | None = None,
) -> BatchLayout:
    """Return the positions of the samples in a target.

    Args:
        target: the target.
        leaves: the same, flattened.
        structure: of the target.
        options: the user's declarations.
        size: number of samples in the inputs.
        known: batch dimensions of earlier targets by name, if no other dimension had the batch's
            size; this target's are added.

    Raises:
        InputError: the options name a missing part, or a part's batch size differs from the
            inputs'.
    """
    input_forms.refuse_nested(leaves)
    names = [name_from_path(path) for path in structure.paths]
    if options.target == "auto":
        rules = _fitting(leaves, names, options, size, {} if known is None else known)
    else:
        rules = _rules(options.target)
    for name in rules:
        if name != OTHERS and not has_value(target, name):
            raise InputError(
                f"batch_options.target names {name!r}, which is not in the target "
                f"(values: {names_in(target)})"
            )
    layout = _layout({"": target}, leaves, names, rules, size, "batch_options.target")
    layout.refuse_misfit()
    _refuse_uncut(leaves, layout, rules)
    return replace(layout, packed=_cut_packed_sequence(structure.key, {"": target}, layout))


def _refuse_uncut(leaves: Sequence[Any], layout: BatchLayout, rules: Mapping[str, Cut]) -> None:
    """Raise an InputError if a part of a target has another size than the batch."""
    for leaf, dim, name in zip(leaves, layout.dims, layout.names, strict=True):
        rule = rule_for(name, rules, 0)[0]
        goes_whole = rule is None or any(is_part(name, one) for one in layout.lists)
        if dim is None and not goes_whole and isinstance(leaf, Tensor) and leaf.dim():
            which = f"dimension {rule} of it" if rule else "its first dimension"
            raise InputError(
                f"a target{f' {name!r}' if name else ''} of shape {tuple(leaf.shape)} does not fit "
                f"a batch of {layout.size} samples: {which} must be the batch. Otherwise declare "
                "BatchOptions(target=1) for another dimension, target='items' for a list of "
                "samples, target=None if it is not cut; or give chunks=1"
            )


def _fitting(
    leaves: Sequence[Any],
    names: Sequence[str],
    options: BatchOptions,
    size: int,
    known: dict[str, int],
) -> dict[str, Cut]:
    """Return for each tensor of a target a dimension whose size is the number of samples.

    By convention it is the first dimension. If another dimension of the inputs is declared, targets
    may have the inputs' layout, (length, batch), or not, (batch, length). Then any dimension of the
    batch's size is accepted. If there are several, the known dimension of earlier targets is
    preferred, then the dimension of the inputs. The comparison of losses checks the choice.
    """
    given = options.inputs.values() if isinstance(options.inputs, Mapping) else [options.inputs]
    declared = [rule for rule in given if isinstance(rule, int)]
    along = declared[0] if declared and declared.count(declared[0]) == len(declared) else 0
    if isinstance(options.inputs, Mapping):
        others = options.inputs.get(OTHERS)
        along = others if isinstance(others, int) else along
    found: dict[str, Cut] = {}
    for name, leaf in zip(names, leaves, strict=True):
        # Without a declared dimension, the convention allows the first one only.
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
        leaves: the target, flattened.
        layout: how they are cut.

    Returns:
        Pairs (position of a tensor, dimension of the batch's size).
    """
    return [
        (place, other)
        for place, (leaf, dim) in enumerate(zip(leaves, layout.dims, strict=False))
        if dim is not None
        for other in _dims_of_size(leaf, layout.size)
        if other != dim
    ]


def spelt_target(options: BatchOptions, layout: BatchLayout, place: int, dim: int) -> str:
    """Return the declaration of another batch dimension for a tensor of a target.

    Args:
        options: the user's declarations.
        layout: of the target.
        place: position of the tensor.
        dim: its batch dimension.
    """
    dims = {
        one: along for one, along in zip(layout.names, layout.dims, strict=True) if along
    }  # others are cut along 0
    target = dims | {layout.names[place]: dim} if layout.names[place] else dim
    inputs = "" if options.inputs == DEFAULT_OPTIONS.inputs else f"inputs={options.inputs!r}, "
    return f"batch_options=BatchOptions({inputs}target={target!r})"


def _rules(given: Cut | Mapping[str, Cut]) -> dict[str, Cut]:
    return dict(given) if isinstance(given, Mapping) else {OTHERS: given}


def _input_name(path: str, parameters: Parameters) -> str:
    """Return the name of an input from its path in ``(args, kwargs)``."""
    steps = name_from_path(path).split(".", 1)
    return parameters.renamed(steps[1]) if steps[0] == "0" else steps[1]


class _Entry(NamedTuple):
    """A value of a batch, and the declaration that applies to it.

    Attributes:
        leaf: a tensor, or another value.
        name: of the value.
        dim: the dimension that should be the batch; None if the value is not a tensor, is not cut,
            or is inside a list of samples.
        is_named: whether the options name the value.
    """

    leaf: Any
    name: str
    dim: int | None
    is_named: bool


def _layout(
    values: Mapping[str, Any],
    leaves: Sequence[Any],
    names: Sequence[str],
    rules: Mapping[str, Cut],
    size: int | None,
    where: str,
) -> BatchLayout:
    """Return the layout of values by declarations.

    Args:
        values: nested tensors by name.
        leaves: their tensors.
        names: of the tensors.
        rules: the declarations by name.
        size: number of samples; None to take it from the declared or first values.
        where: the option that holds the declarations, for messages.

    Raises:
        InputError: a declaration contradicts a value.
    """
    lists = {
        name: len(one) for value in values.items() for name, one in _sample_lists(*value, rules)
    }
    misfit = _misfit(values, list(zip(leaves, names, strict=True)), rules, lists, where)
    entries = [_entry(leaf, name, rules, lists) for leaf, name in zip(leaves, names, strict=True)]
    sizes = [*lists.values(), *_batch_sizes(entries, where)]
    if size is None:
        size = sizes[0] if sizes else 1
    for name, length in lists.items():
        if length != size:
            raise InputError(f"{name!r} is a list of {length} samples, and the batch has {size}")
    return BatchLayout(
        size=size,
        dims=tuple(_batch_dim(entry, size, where) for entry in entries),
        names=tuple(names),
        declared=tuple(entry.is_named for entry in entries),
        lists=frozenset(lists),
        misfit=misfit,
    )


def _entry(leaf: Any, name: str, rules: Mapping[str, Cut], lists: Collection[str]) -> _Entry:
    rule, key = rule_for(name, rules, 0)
    is_cut = isinstance(leaf, Tensor) and not any(is_part(name, one) for one in lists)
    return _Entry(leaf, name, rule if is_cut and isinstance(rule, int) else None, key != OTHERS)


def _batch_sizes(entries: Sequence[_Entry], where: str) -> Iterator[int]:
    """Yield the sizes of the batch dimensions, named values first."""
    for leaf, name, dim, is_named in sorted(entries, key=lambda entry: not entry.is_named):
        if dim is None:
            continue
        if leaf.dim() > dim:
            yield int(leaf.shape[dim])
        elif is_named:
            raise InputError(
                f"{where} says that dimension {dim} of {name!r} is the batch; it has shape "
                f"{tuple(leaf.shape)}"
            )


def _batch_dim(entry: _Entry, size: int, where: str) -> int | None:
    """Return a value's batch dimension; None if it is not cut.

    A value of another size than the batch is not cut, unless the options name it.
    """
    leaf, name, dim, is_named = entry
    if dim is None or leaf.dim() <= dim:
        return None
    if leaf.shape[dim] == size:
        return dim
    if is_named:
        raise InputError(
            f"{name!r} has shape {tuple(leaf.shape)}, {leaf.shape[dim]} along dimension {dim}, "
            f"which {where} says is the batch; the batch has {size} samples"
        )
    return None


def _misfit(
    values: Mapping[str, Any],
    leaves: Sequence[tuple[Any, str]],
    rules: Mapping[str, Cut],
    lists: Collection[str],
    where: str,
) -> str:
    """Return the message about a declaration that fits none of the values; empty if all fit.

    Args:
        values: nested tensors by name.
        leaves: their tensors, each with its name.
        rules: the declarations by name.
        lists: names of the lists whose items are samples.
        where: the option that holds the declarations.

    Raises:
        InputError: a value whose items are declared as samples is a tensor, not a list.
    """
    return _named_misfit(values, rules, lists, where) or _other_misfit(leaves, rules, lists, where)


def _named_misfit(
    values: Mapping[str, Any], rules: Mapping[str, Cut], lists: Collection[str], where: str
) -> str:
    """Return the message about a named value that a declaration does not fit."""
    nest = values.get("", values)
    for name, rule in rules.items():
        given = value_named(nest, name) if name != OTHERS else None
        if given is None or given is MISSING:
            continue
        if rule == "items" and not any(is_part(one, name) for one in lists):
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
            lack = " without tensors" if is_nest else ", which has no dimensions"
            items = ", or 'items' for a list of samples" if is_nest else ""
            return (
                f"{where} says that dimension {rule} of {name!r} is the batch; it is "
                f"{kind_of(given)}{lack}; leave it out, or give None{items}"
            )
    return ""


def _other_misfit(
    leaves: Sequence[tuple[Any, str]],
    rules: Mapping[str, Cut],
    lists: Collection[str],
    where: str,
) -> str:
    """Return the message about the declaration of unnamed values, if it fits none of them."""
    rule = rules.get(OTHERS)
    others = [(leaf, name) for leaf, name in leaves if rule_for(name, rules, 0)[1] == OTHERS]
    outside = [
        (leaf, name) for leaf, name in others if not any(is_part(name, one) for one in lists)
    ]
    shapes = {
        name: tuple(leaf.shape) for leaf, name in outside if isinstance(leaf, Tensor) and leaf.dim()
    }
    if not shapes or rule is None:
        return ""
    most = max(map(len, shapes.values()))
    shown = ", ".join(
        f"{name or 'it'} has shape {shape}" for name, shape in list(shapes.items())[:MAX_NAMES]
    )
    if isinstance(rule, int) and rule >= most:
        return (
            f"{where} says that dimension {rule} is the batch, and no tensor has that many "
            f"dimensions: {shown}; give a dimension from 0 to {most - 1}, None to cut nothing, "
            "or one of these for each name"
        )
    if rule == "items" and len(others) == len(outside):
        return (
            f"{where} says that the items of lists are samples, and there is no list: {shown}; "
            "give a dimension, None to cut nothing, or one of these for each name"
        )
    return ""


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number or string, or contains nothing else."""
    if isinstance(value, (list, tuple, dict)):
        items = list(value.values() if isinstance(value, dict) else value)
        return bool(items) and all(map(_is_plain, items))
    return isinstance(value, (bool, int, float, complex, str, bytes))


def _sample_lists(name: str, value: Any, rules: Mapping[str, Cut]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of the outermost lists whose items are samples."""
    if "items" not in rules.values() or isinstance(value, Tensor):
        return
    if (
        isinstance(value, (list, tuple))
        and not hasattr(value, "_fields")
        and rule_for(name, rules, 0)[0] == "items"
    ):
        yield name, value
        return
    for label, child in zip(*(container_parts(value) or ((), ()))[:2], strict=True):
        yield from _sample_lists(name_of_part(name, label), child, rules)


def _cut_packed_sequence(
    key: Hashable, values: Mapping[str, Any], layout: BatchLayout
) -> str | None:
    """Return the name of a PackedSequence that would be cut; None without one."""
    if not _has_packed(key):
        return None
    cuts = [name for name, dim in zip(layout.names, layout.dims, strict=True) if dim is not None]
    waiting = list(values.items())
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, PackedSequence) and any(is_part(one, name) for one in cuts):
            return name
        if not isinstance(value, (Tensor, PackedSequence)):
            labels, children, _ = container_parts(value) or ([], [], None)
            waiting += [
                (name_of_part(name, label), child)
                for label, child in zip(labels, children, strict=True)
            ]
    return None


def _has_packed(key: Hashable) -> bool:
    return key is PackedSequence or (isinstance(key, tuple) and any(map(_has_packed, key)))
