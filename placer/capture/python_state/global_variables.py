"""Variables of files and attributes of classes that a model's code reads or keeps tensors in.

    SCALE = 0.5                  # read in forward: the captured graph contains its value
    args = parser.parse_args()   # likewise args.temperature
    AUX = []                     # AUX.append(loss) in forward: the graph would not append it

They are found by the names in the code of ``forward``, of the methods and functions of the same
files that it names, and in their closures. Names in code that never runs count, too.
"""

from __future__ import annotations

import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from placer.capture.pytrees import flatten
from placer.utils.python_objects import is_object, is_torchs

# Types whose values can be compared by identity and items.
_PLAIN_TYPES = (bool, int, float, str, type(None), Tensor, list, tuple, dict, set)
# Containers that forward may fill; they are compared with a copy.
_CONTAINERS = (list, dict, OrderedDict, set, deque)
_MISSING = object()

Place = tuple[Any, str]
"""A holder, and the name of a variable or attribute that it has or may have."""

Snapshot = tuple[Place, Any, Any]
"""A place, its value, and a copy of the value if it is a container."""


class Variables:
    """The variables that the code of a model's own classes names.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        kinds = dict.fromkeys(base for child in model.modules() for base in type(child).__mro__)
        self._classes = [kind for kind in kinds if not _is_library_class(kind)]

    def read(self) -> list[Snapshot]:
        """Return the variables with plain values, and their present values."""
        attributes = [
            (one, name)
            for one in (*self.objects, *self._kinds)
            for name in self._named
            if name in vars(one)
        ]
        cells = [
            (cell, "cell_contents")
            for function in self._code
            for cell in function.__closure__ or ()
        ]
        places = {
            (id(holder), name): (holder, name)
            for holder, name in (*self._variables, *attributes, *cells)
        }
        held = [(place, getattr(*place, None)) for place in places.values()]
        return [_snapshot(place, value) for place, value in held if type(value) in _PLAIN_TYPES]

    def contents(self) -> list[Snapshot]:
        """Return the variables that tensors may be left in, and their present values."""
        attributes = [(kind, name) for kind in self._classes for name in self._named]
        return [
            _snapshot(place, vars(place[0]).get(place[1], _MISSING))
            for place in (*self._variables, *attributes)
        ]

    @cached_property
    def objects(self) -> list[Any]:
        """Return the objects that variables hold, such as settings."""
        values = [getattr(*place) for place in self._variables]
        return [value for value in values if is_object(value)]

    @cached_property
    def _kinds(self) -> list[type]:
        """Return the model's own classes and the classes that variables hold."""
        values = [getattr(*place) for place in self._variables]
        return [
            *self._classes,
            *(
                value
                for value in values
                if isinstance(value, type) and not _is_library_class(value)
            ),
        ]

    @cached_property
    def _named(self) -> set[str]:
        return {name for function in self._code for name in _names(function.__code__)}

    @cached_property
    def _code(self) -> list[types.FunctionType]:
        """Return ``forward`` of each class, and the code that it reaches by name.

            forward ──▶ names in its code ──▶ methods of the model's classes ──▶ their names ...
                                          └─▶ functions of the same files

        Names that lead to other libraries are not followed.
        """
        files = {kind.__module__ for kind in self._classes}
        methods: dict[str, list[types.FunctionType]] = defaultdict(list)
        for kind in self._classes:
            for name, value in vars(kind).items():
                methods[name] += filter(None, [_function(value)])
        found: dict[types.FunctionType, None] = {}
        waiting = [*methods["forward"]]
        while waiting:
            function = waiting.pop()
            if function in found:
                continue
            found[function] = None
            for name in _names(function.__code__):
                waiting += methods.get(name, ())
                other = _function(function.__globals__.get(name))
                waiting += [other] if other is not None and other.__module__ in files else []
        return list(found)

    @cached_property
    def _variables(self) -> list[Place]:
        """Return the variables of the files that the code is in."""
        found: dict[tuple[int, str], Place] = {}
        for function in self._code:
            file = sys.modules.get(function.__module__)
            # The module may have been reloaded or created by exec.
            if file is not None and vars(file) is function.__globals__:
                named = _names(function.__code__).intersection(vars(file))
                found |= {(id(file), name): (file, name) for name in named}
        return list(found.values())


def unchanged_places(before: Iterable[Snapshot]) -> tuple[Place, ...]:
    """Return the places whose values have not changed since.

    ``forward`` maintains the other places itself.

    Args:
        before: from ``Variables.read``, before the code ran.
    """
    return tuple(
        place
        for place, value, copy in before
        if _is_unchanged(getattr(*place, _MISSING), value, copy)
    )


def remove_tensors(before: Iterable[Snapshot]) -> list[str]:
    """Remove tensors that were left in variables since, and return descriptions of their places.

    Args:
        before: from ``Variables.contents``.
    """
    found = []
    for (holder, name), value, copy in before:
        now = vars(holder).get(name, _MISSING)
        if _is_unchanged(now, value, copy) or not _has_tensors(now):
            continue
        if now is not value:
            delattr(holder, name) if value is _MISSING else setattr(holder, name, value)
        else:
            now.clear()
            (now.extend if isinstance(now, list | deque) else now.update)(copy)
        where = (
            f"the variable {name!r} of" if isinstance(holder, types.ModuleType) else f"{name!r} of"
        )
        found.append(f"{where} {holder.__name__}")
    return found


def _snapshot(place: Place, value: Any) -> Snapshot:
    return place, value, value.copy() if type(value) in _CONTAINERS else None


def _is_unchanged(now: Any, value: Any, copy: Any) -> bool:
    return now is value and (copy is None or [*map(id, _items(now))] == [*map(id, _items(copy))])


def _items(filled: Any) -> Iterable[Any]:
    return (*filled, *filled.values()) if isinstance(filled, dict) else filled


def _has_tensors(value: Any) -> bool:
    leaves = list(value) if isinstance(value, set | deque) else flatten(value)[0]
    return any(isinstance(leaf, Tensor) for leaf in leaves)


def _is_library_class(kind: type) -> bool:
    """Return whether a class belongs to torch or to Python's standard library."""
    return is_torchs(kind) or kind.__module__.split(".")[0] in sys.stdlib_module_names


def _function(value: Any) -> types.FunctionType | None:
    """Return the Python function behind a method, a property or a wrapper; else None."""
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    value = getattr(value, "__wrapped__", value)
    return value if isinstance(value, types.FunctionType) else None


def _names(code: types.CodeType) -> set[str]:
    return {
        name for one in _nested_code(code) for name in one.co_names if not name.startswith("__")
    }


def _nested_code(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and the code objects of functions defined in it."""
    yield code
    inside: Iterable[Any] = code.co_consts
    for constant in inside:
        if isinstance(constant, types.CodeType):
            yield from _nested_code(constant)
