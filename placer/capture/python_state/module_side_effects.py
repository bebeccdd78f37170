"""What a model's code leaves on its modules beside its result, while it is looked at: all of it is
taken away again.

self.calls += 1                            # a look is no call
self.average = 0.9 * self.average + mean   # a buffer that is replaced: its value is written into the buffer
self.attention = weights                   # a tensor of the pass: a graph would not leave it
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

from placer.capture.python_state.attribute_reads import objects_of
from placer.capture.python_state.global_variables import Variables
from placer.capture.python_state.global_variables import put_back as put_back_variables
from placer.capture.pytrees import flatten
from placer.errors import CaptureError
from placer.utils.python_objects import is_torchs, own


class KeptError(CaptureError):
    """Forward keeps tensors on modules. In later calls it may not: what it keeps is then there, as
    in a cache.
    """


@dataclass(frozen=True, eq=False)
class Counted:
    """An attribute of a module, or of an object, that forward set to another number, flag or word,
    or put items in.
    """

    holder: Any
    name: str


_STATE = ("_parameters", "_buffers", "_modules")
_CONTAINERS = (list, dict, set, OrderedDict, defaultdict, deque, Counter)
_NONE = object()


class Leftovers:
    """What has changed on a model's modules, and on objects that these have, since this was made.

    Attributes:
        changed: whether anything had, when it was put back.
        tensors: the attributes and variables that tensors of the pass were left in, in words.
        counted: the holders and names of the attributes that another number, flag or word was left
            in, or other items.
        replaced: the names of the buffers whose new values were written into them.
    """

    def __init__(self, model: nn.Module) -> None:
        self.changed = False
        self.tensors: list[str] = []
        self.counted: list[Counted] = []
        self.replaced: set[str] = set()
        # While a graph is made, a module that has several names is another proxy by each; they
        # share its attributes.
        self._named = list(model.named_modules(remove_duplicate=False))
        self._before = {
            child: (dict(child.__dict__), _contents(child.__dict__)) for _, child in self._named
        }
        variables = Variables(model)
        self._variables, self._read = variables.contents(), variables.read()
        holders = [
            *(child for child in self._before if not is_torchs(type(child))),
            *variables.objects,
        ]
        objects = {id(one): one for one in (*variables.objects, *objects_of(holders))}.values()
        self._objects = [(one, dict(own(one)), _contents(own(one))) for one in objects]

    def plain_tensors(self) -> list[Tensor]:
        """The tensors among attributes, variables, and what these hold, that are neither parameters
        nor buffers.
        """
        held = [
            value
            for child in self._before
            for key, value in child.__dict__.items()
            if key not in _STATE
        ]
        held += [value for one, fields, _ in self._objects for value in fields.values()]
        held += [value for _, value, _ in (*self._variables, *self._read)]
        functions = [value for value in held if isinstance(value, types.FunctionType)]
        held += [
            value
            for function in functions
            for value in inspect.getclosurevars(function).nonlocals.values()
        ]
        found = (item for value in held for item in flatten(value)[0] if isinstance(item, Tensor))
        return list({id(tensor): tensor for tensor in found}.values())

    def write_buffers(self) -> None:
        """Write the values of buffers that were replaced by others like them into those that were
        there before.
        """
        for name, child in self._named:
            for key, before in self._before[child][1].get("_buffers", {}).items():
                now = child._buffers.get(key)
                if now is before or before is None or now is None or not _is_like(now, before):
                    continue
                before.copy_(now)
                child._buffers[key] = before
                self.replaced |= {other for other in self._names_of(child, key, name)}

    def _names_of(self, child: nn.Module, key: str, name: str) -> set[str]:
        others = {other for other, module in self._named if module is child}
        return {f"{other}.{key}".lstrip(".") for other in (name, *others)}

    def put_back(self) -> None:
        """Leave the modules as they were."""
        names = {child: name for name, child in reversed(self._named)}
        self.tensors += put_back_variables(self._variables)
        for one, fields, contents in self._objects:
            for key, value in self._put_back(own(one), fields, contents).items():
                if isinstance(value, bool | int | float | str):
                    self.counted.append(Counted(one, key))
                elif _has_tensors(value):
                    self.tensors.append(f"{key!r} of a {type(one).__name__}")
                elif key in contents:
                    self.counted.append(Counted(one, key))
        for child, (fields, contents) in self._before.items():
            for key, value in self._put_back(child.__dict__, fields, contents).items():
                if isinstance(value, bool | int | float | str):
                    self.counted.append(Counted(child, key))
                elif (
                    key not in fields["_parameters"]
                    and not _is_torchs_own(child, key)
                    and _has_tensors(value)
                ):
                    self.tensors.append(f"{key!r} of {names.get(child) or 'the model'!r}")
                elif key in contents and not is_torchs(type(child)):
                    self.counted.append(Counted(child, key))

    def _put_back(
        self, now: dict[str, Any], fields: dict[str, Any], contents: dict[str, Any]
    ) -> dict[str, Any]:
        """Leave one as it was; what there was to put back."""
        left = _differing(fields, now)
        for key, was in contents.items():
            value = fields[key]
            if _items(value) != _items(was):
                inside = _differing(was, value) if isinstance(value, dict) else {key: list(value)}
                left |= inside if key in _STATE else {key: inside}
                _refill(value, was)
        if left:
            self.changed = True
            now.clear()
            now.update(fields)
        return left


@contextmanager
def put_back(model: nn.Module) -> Iterator[Leftovers]:
    """Give modules the attributes back that code inside sets on them, lists and dicts their items.

    Args:
        model: whose modules are meant.

    Yields:
        What there was to put back; complete afterwards.
    """
    left = Leftovers(model)
    try:
        yield left
    finally:
        left.put_back()


def read_before_written(graph: fx.Graph, names: set[str]) -> None:
    """Let what reads these buffers read a copy: the model kept the tensor that it had read, for its
    backward pass too.

    Args:
        graph: writes to the buffers.
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


def _is_like(now: Tensor, before: Tensor) -> bool:
    """Whether a buffer may take the other's value: no graph of gradients goes on from call to call."""
    return now.shape == before.shape and now.dtype == before.dtype and not now.requires_grad


def _is_torchs_own(child: nn.Module, key: str) -> bool:
    """Whether torch itself sets an attribute: for itself in a module of its own, or in hooks of
    norms or pruning.
    """
    hooks = child._forward_pre_hooks.values()
    names = {getattr(hook, name, "") for hook in hooks for name in ("name", "_tensor_name")}
    return key in names or (
        is_torchs(type(child)) and (key.startswith("_") or key in child._buffers)
    )


def _contents(fields: dict[str, Any]) -> dict[str, Any]:
    """Copies of the lists, dicts and the like among attributes, a module's hooks among them."""
    return {key: value.copy() for key, value in fields.items() if type(value) in _CONTAINERS}


def _differing(was: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """What there is now under names that had something else, or nothing; and None for what is gone."""
    names = (*was, *(name for name in now if name not in was))
    return {
        name: now.get(name) for name in names if was.get(name, _NONE) is not now.get(name, _NONE)
    }


def _items(value: Any) -> list[int]:
    """The identities of what a list, dict or the like holds."""
    if isinstance(value, set):
        return sorted(map(id, value))
    return [id(part) for part in ([*value, *value.values()] if isinstance(value, dict) else value)]


def _refill(value: Any, was: Any) -> None:
    value.clear()
    (value.extend if isinstance(value, list | deque) else value.update)(was)


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in flatten(value)[0])
