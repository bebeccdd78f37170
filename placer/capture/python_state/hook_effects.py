"""What the user's hooks leave in Python objects, and its removal after a trial run.

    seen = []                                                           # restored
    model.head.register_forward_hook(lambda module, args, output: seen.append(output))

    class Recorder:
        def __call__(self, module, args, output):
            self.calls += 1                                             # restored
            self.outputs[module] = output                               # restored

Hooks reach these objects through closures, arguments of ``functools.partial``, their own attributes
and global variables. What a hook writes elsewhere, such as to a file, stays.
"""

from __future__ import annotations

import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from placer.capture.python_state.module_hooks import user_hooks
from placer.utils.python_objects import is_object, own

_CONTAINERS = (list, dict, set, OrderedDict, defaultdict, deque, Counter)
_MAX_DEPTH = 4
"""Maximum number of references from a hook to an object that is restored."""
_MAX_ITEMS = 1000
"""Maximum length of a container whose items are searched, too."""


@contextmanager
def restored_hooks(model: nn.Module) -> Iterator[None]:
    """Restore the Python objects that hooks of a model write to inside.

    Args:
        model: the model whose modules have the hooks. Its modules are not restored.
    """
    state = _HookState(user_hooks(model), {id(own(child)) for child in model.modules()})
    try:
        yield
    finally:
        state.restore()


class _HookState:
    """The present content of the variables, attributes and containers that hooks reach.

    Args:
        hooks: functions or objects.
        left_out: identities of containers that are not restored.
    """

    def __init__(self, hooks: Iterable[Any], left_out: set[int]) -> None:
        self._left_out = left_out
        self._cells: list[tuple[types.CellType, Any]] = []
        self._variables: list[tuple[dict[str, Any], str, Any]] = []
        self._contents: dict[int, tuple[Any, Any]] = {}
        waiting = list(hooks)
        for _ in range(_MAX_DEPTH):
            waiting = [inside for value in waiting for inside in self._noted(value)]

    def restore(self) -> None:
        """Restore everything that has changed."""
        for cell, value in self._cells:
            cell.cell_contents = value
        for variables, name, value in self._variables:
            variables[name] = value
        for now, before in self._contents.values():
            if _items(now) != _items(before):
                now.clear()
                (now.extend if isinstance(now, list | deque) else now.update)(before)

    def _noted(self, value: Any) -> list[Any]:
        """Note what a value contains, and return it."""
        if isinstance(value, types.FunctionType):
            return self._noted_function(value)
        if isinstance(value, types.MethodType):
            return [value.__func__, value.__self__]
        if isinstance(value, partial):
            return [value.func, *value.args, *value.keywords.values()]
        has_attributes = isinstance(getattr(value, "__dict__", None), dict)
        is_callable = callable(value) and has_attributes and not isinstance(value, type)
        if is_callable or is_object(value):
            value = own(value)
        is_known = id(value) in self._contents or id(value) in self._left_out
        if is_known or type(value) not in _CONTAINERS:
            return []
        self._contents[id(value)] = value, value.copy()
        if len(value) > _MAX_ITEMS:
            return []
        return [*value.values()] if isinstance(value, dict) else [*value]

    def _noted_function(self, function: types.FunctionType) -> list[Any]:
        found: list[Any] = [*(function.__defaults__ or ())]
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # the variable has no value yet
                continue
            self._cells.append((cell, value))
            found.append(value)
        variables = function.__globals__
        for name in function.__code__.co_names:
            value = variables.get(name)
            # other global objects, such as a library's, may change in other threads
            if type(value) in (*_CONTAINERS, int, float, str):
                self._variables.append((variables, name, value))
                found.append(value)
        return found


def _items(container: Any) -> list[int]:
    """Return the identities of a container's items, in their order unless it is a set."""
    if isinstance(container, set):
        return sorted(map(id, container))
    is_dict = isinstance(container, dict)
    return [*map(id, (*container, *container.values()) if is_dict else container)]
