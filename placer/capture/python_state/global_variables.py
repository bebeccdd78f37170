"""What a model's code reads and keeps outside of its modules: variables of its files, and
attributes of its classes.

    SCALE = 0.5                       # read in forward: a captured graph holds its value
    args = parser.parse_args()        # likewise args.temperature
    AUX = []                          # AUX.append(loss) in forward: a tensor of the pass, which a graph would not leave

Told by the names in the code of ``forward``, of the methods and the functions of the same files
that it names, and of what these close over: names that are never reached count, too.
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

_PLAIN = (bool, int, float, str, type(None), Tensor, list, tuple, dict, set)
_FILLED = (list, dict, OrderedDict, set, deque)
_NONE = object()

Place = tuple[Any, str]
"""A holder, and the name of a variable or an attribute that it has, or may have."""

Held = tuple[Place, Any, Any]
"""A place, what was there, and a copy of it where it can be filled."""


class Variables:
    """Those that the code of a model's own classes names.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        kinds = dict.fromkeys(base for child in model.modules() for base in type(child).__mro__)
        self._classes = [kind for kind in kinds if not _is_known(kind)]

    def read(self) -> list[Held]:
        """The plain ones, with what is there now."""
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
        return [_held(place, value) for place, value in held if type(value) in _PLAIN]

    def contents(self) -> list[Held]:
        """What tensors may be left in, with what is there now."""
        attributes = [(kind, name) for kind in self._classes for name in self._named]
        return [
            _held(place, vars(place[0]).get(place[1], _NONE))
            for place in (*self._variables, *attributes)
        ]

    @cached_property
    def objects(self) -> list[Any]:
        """The objects that variables hold, settings or records of somebody's own."""
        values = [getattr(*place) for place in self._variables]
        return [value for value in values if is_object(value)]

    @cached_property
    def _kinds(self) -> list[type]:
        """The model's own classes, and those that variables hold."""
        values = [getattr(*place) for place in self._variables]
        return [
            *self._classes,
            *(value for value in values if isinstance(value, type) and not _is_known(value)),
        ]

    @cached_property
    def _named(self) -> set[str]:
        return {name for function in self._code for name in _names(function.__code__)}

    @cached_property
    def _code(self) -> list[types.FunctionType]:
        """``forward`` of each class, and what it names: methods of these classes, and functions of
        their files.
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
        """Those of the files that the code is in."""
        found: dict[tuple[int, str], Place] = {}
        for function in self._code:
            file = sys.modules.get(function.__module__)
            if file is not None and vars(file) is function.__globals__:
                named = _names(function.__code__).intersection(vars(file))
                found |= {(id(file), name): (file, name) for name in named}
        return list(found.values())


def only_read(before: Iterable[Held]) -> tuple[Place, ...]:
    """The places where nothing has changed since: what ``forward`` itself changes is its own
    affair.

    Args:
        before: from ``Variables.read``, before it ran.
    """
    return tuple(
        place for place, value, copy in before if _is_as_it_was(getattr(*place, _NONE), value, copy)
    )


def put_back(before: Iterable[Held]) -> list[str]:
    """Take tensors away again that were left in variables since; their places, in words.

    Args:
        before: from ``Variables.contents``.
    """
    found = []
    for (holder, name), value, copy in before:
        now = vars(holder).get(name, _NONE)
        if _is_as_it_was(now, value, copy) or not _has_tensors(now):
            continue
        if now is not value:
            delattr(holder, name) if value is _NONE else setattr(holder, name, value)
        else:
            now.clear()
            (now.extend if isinstance(now, list | deque) else now.update)(copy)
        where = (
            f"the variable {name!r} of" if isinstance(holder, types.ModuleType) else f"{name!r} of"
        )
        found.append(f"{where} {holder.__name__}")
    return found


def _held(place: Place, value: Any) -> Held:
    return place, value, value.copy() if type(value) in _FILLED else None


def _is_as_it_was(now: Any, value: Any, copy: Any) -> bool:
    return now is value and (copy is None or [*map(id, _items(now))] == [*map(id, _items(copy))])


def _items(filled: Any) -> Iterable[Any]:
    return (*filled, *filled.values()) if isinstance(filled, dict) else filled


def _has_tensors(value: Any) -> bool:
    leaves = list(value) if isinstance(value, set | deque) else flatten(value)[0]
    return any(isinstance(leaf, Tensor) for leaf in leaves)


def _is_known(kind: type) -> bool:
    """Whether a class is torch's, or of Python's own library."""
    return is_torchs(kind) or kind.__module__.split(".")[0] in sys.stdlib_module_names


def _function(value: Any) -> types.FunctionType | None:
    """The function behind a method, a property, or a function that another one wraps."""
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    value = getattr(value, "__wrapped__", value)
    return value if isinstance(value, types.FunctionType) else None


def _names(code: types.CodeType) -> set[str]:
    return {name for one in _inner(code) for name in one.co_names if not name.startswith("__")}


def _inner(code: types.CodeType) -> Iterator[types.CodeType]:
    """Code, and that of the functions in it."""
    yield code
    inside: Iterable[Any] = code.co_consts
    for constant in inside:
        if isinstance(constant, types.CodeType):
            yield from _inner(constant)
