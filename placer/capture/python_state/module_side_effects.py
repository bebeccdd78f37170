"""Side effects of a model's code on its modules while it is traced; all of them are undone.

    self.calls += 1                            # a trace does not count as a call
    self.average = 0.9 * self.average + mean   # replaced buffer: write its value into the buffer
    self.attention = weights                   # tensor of the pass: refuse to capture the model

So a capture leaves the model unchanged.
"""

from __future__ import annotations

import inspect
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from placer.capture.python_state.attribute_reads import nested_objects
from placer.capture.python_state.global_variables import Variables
from placer.capture.python_state.global_variables import remove_tensors as put_back_variables
from placer.capture.pytrees import flatten
from placer.errors import CaptureError
from placer.utils.python_objects import is_torchs, own


class KeptError(CaptureError):
    """An error: forward keeps tensors on modules.

    A later call may not keep them again, if the kept tensor is a cache.
    """


@dataclass(frozen=True, eq=False)
class SetAttribute:
    """An attribute with another number, flag or string after forward, or other items."""

    holder: Any
    name: str


_NUMBERS_AND_WORDS = (bool, int, float, str)
# nn.Module's own dicts; their items, not the dicts, are the module's attributes.
_STATE = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (list, dict, set, OrderedDict, defaultdict, deque, Counter)
_MISSING = object()


class SideEffects:
    """The changes on a model's modules, and on objects that these hold, since this was made.

    Args:
        model: the model.

    Attributes:
        changed: whether anything had changed when it was put back.
        tensors: descriptions of the attributes and variables that tensors of the pass were left in.
        set_attributes: attributes that were set to another number, flag or string, or whose items
            changed.
        replaced: names of the buffers whose new values were written into them.
    """

    def __init__(self, model: nn.Module) -> None:
        self.changed = False
        self.tensors: list[str] = []
        self.set_attributes: list[SetAttribute] = []
        self.replaced: set[str] = set()
        # During a trace, a module with several names is another proxy by each name. The proxies
        # share its attributes, so all of them are restored.
        self._named = list(model.named_modules(remove_duplicate=False))
        self._before = {
            child: (dict(child.__dict__), _copy_containers(child.__dict__))
            for _, child in self._named
        }
        variables = Variables(model)
        self._variables, self._read = variables.contents(), variables.read()
        holders = [
            *(child for child in self._before if not is_torchs(type(child))),
            *variables.objects,
        ]
        objects = {id(one): one for one in (*variables.objects, *nested_objects(holders))}.values()
        self._objects = [(one, dict(own(one)), _copy_containers(own(one))) for one in objects]

    def plain_tensors(self) -> list[Tensor]:
        """Return the unregistered tensors in attributes, variables and their containers."""
        held = [
            value
            for child in self._before
            for key, value in child.__dict__.items()
            if key not in _STATE
        ]
        held += [value for one, fields, _ in self._objects for value in fields.values()]
        held += [value for _, value, _ in (*self._variables, *self._read)]
        # A function kept as an attribute may have tensors in its closure.
        functions = [value for value in held if isinstance(value, types.FunctionType)]
        held += [
            value
            for function in functions
            for value in inspect.getclosurevars(function).nonlocals.values()
        ]
        found = (item for value in held for item in flatten(value)[0] if isinstance(item, Tensor))
        return list({id(tensor): tensor for tensor in found}.values())

    def write_buffers(self) -> None:
        """Write the values of replaced buffers into the original buffers, if they fit."""
        for name, child in self._named:
            for key, before in self._before[child][1].get("_buffers", {}).items():
                now = child._buffers.get(key)
                if now is before or before is None or now is None or not _fits_buffer(now, before):
                    continue
                before.copy_(now)
                child._buffers[key] = before
                self.replaced |= {other for other in self._names_of(child, key, name)}

    def _names_of(self, child: nn.Module, key: str, name: str) -> set[str]:
        others = {other for other, module in self._named if module is child}
        return {f"{other}.{key}".lstrip(".") for other in (name, *others)}

    def restore(self) -> None:
        """Restore the modules, and record what had changed."""
        # Reversed, so that the first of several names of a module is reported.
        names = {child: name for name, child in reversed(self._named)}
        self.tensors += put_back_variables(self._variables)
        for one, fields, contents in self._objects:
            for key, value in self._restore_one(own(one), fields, contents).items():
                if not isinstance(value, _NUMBERS_AND_WORDS) and _has_tensors(value):
                    self.tensors.append(f"{key!r} of a {type(one).__name__}")
                elif isinstance(value, _NUMBERS_AND_WORDS) or key in contents:
                    self.set_attributes.append(SetAttribute(one, key))
        for child, (fields, contents) in self._before.items():
            for key, value in self._restore_one(child.__dict__, fields, contents).items():
                if isinstance(value, _NUMBERS_AND_WORDS):
                    self.set_attributes.append(SetAttribute(child, key))
                elif _is_kept_tensor(child, key, value, fields):
                    self.tensors.append(f"{key!r} of {names.get(child) or 'the model'!r}")
                # A container whose items changed, such as a list of lengths.
                elif key in contents and not is_torchs(type(child)):
                    self.set_attributes.append(SetAttribute(child, key))

    def _restore_one(
        self, now: dict[str, Any], fields: dict[str, Any], contents: dict[str, Any]
    ) -> dict[str, Any]:
        """Restore one object's attributes, and return those that had changed."""
        left = _changed_items(fields, now)
        for key, was in contents.items():
            value = fields[key]
            if _item_ids(value) != _item_ids(was):
                inside = (
                    _changed_items(was, value) if isinstance(value, dict) else {key: list(value)}
                )
                left |= inside if key in _STATE else {key: inside}
                _refill(value, was)
        if left:
            self.changed = True
            now.clear()
            now.update(fields)
        return left


@contextmanager
def restored_modules(model: nn.Module) -> Iterator[SideEffects]:
    """Restore the attributes that code inside sets on modules, and the items of lists and dicts.

    Args:
        model: the model whose modules to restore.

    Yields:
        What has changed; complete afterwards.
    """
    effects = SideEffects(model)
    try:
        yield effects
    finally:
        effects.restore()


def read_before_written(graph: fx.Graph, names: set[str]) -> None:
    """Make readers of these buffers read a copy taken before the write.

    In the model, a replaced buffer leaves the old tensor intact for its readers and their backward
    pass. In the graph, the new value is written into the old tensor.

    Args:
        graph: a graph that writes to the buffers.
        names: the targets of their nodes.
    """
    for node in list(graph.nodes):
        if node.op != "get_attr" or node.target not in names:
            continue
        with graph.inserting_after(node):
            copy = graph.call_function(torch.ops.aten.clone.default, (node,))
        copy.meta = {"val": node.meta.get("val")}
        node.replace_all_uses_with(
            copy, delete_user_cb=lambda user, copy=copy: user is not copy and not _writes(user)
        )


def _writes(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.copy_.default


def _fits_buffer(now: Tensor, before: Tensor) -> bool:
    """Return whether a buffer can take this value: no graph of gradients spans several calls."""
    return now.shape == before.shape and now.dtype == before.dtype and not now.requires_grad


def _is_kept_tensor(child: nn.Module, key: str, value: Any, before: dict[str, Any]) -> bool:
    """Return whether an attribute keeps a tensor that neither torch nor the user registered."""
    if key in before["_parameters"] or _is_set_by_torch(child, key):
        return False
    return _has_tensors(value)


def _is_set_by_torch(child: nn.Module, key: str) -> bool:
    """Return whether torch itself sets an attribute.

    torch's own modules set private ones, and hooks for weight norms and pruning set the weight.
    """
    hooks = child._forward_pre_hooks.values()
    names = {getattr(hook, name, "") for hook in hooks for name in ("name", "_tensor_name")}
    return key in names or (
        is_torchs(type(child)) and (key.startswith("_") or key in child._buffers)
    )


def _copy_containers(fields: dict[str, Any]) -> dict[str, Any]:
    """Return copies of the containers among attributes, including a module's hooks."""
    return {key: value.copy() for key, value in fields.items() if type(value) in _CONTAINERS}


def _changed_items(was: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the present values of changed names; None for deleted ones."""
    names = (*was, *(name for name in now if name not in was))
    return {
        name: now.get(name)
        for name in names
        if was.get(name, _MISSING) is not now.get(name, _MISSING)
    }


def _item_ids(value: Any) -> list[int]:
    """Return the identities of a container's items."""
    if isinstance(value, set):
        return sorted(map(id, value))
    return [id(part) for part in ([*value, *value.values()] if isinstance(value, dict) else value)]


def _refill(value: Any, was: Any) -> None:
    value.clear()
    (value.extend if isinstance(value, list | deque) else value.update)(was)


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in flatten(value)[0])
