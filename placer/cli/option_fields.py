"""Command-line options made from options objects, such as ``SolveOptions``.

Each field becomes one option: its name, type, bounds and default are the field's, and its help is
the first sentence of the field's description. ``SPELLED`` lists the fields whose values need a
form of their own on a command line.

    class SolveOptions:                        placer solve --time-limit SECONDS
        time_limit_s: float = 30.0      ──▶        Seconds to solve; ... [default: 30.0]
        \"\"\"Seconds to solve; ...\"\"\"
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import partial, wraps
from types import UnionType
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from placer.cli import options as shared_options
from placer.cli.terminal import extra, users_code
from placer.errors import InputError
from placer.schema import BatchOptions
from placer.schema.base import Wire
from placer.utils.units import parse_bytes

O = TypeVar("O", bound=Wire)  # noqa: E741  # the kind of options
Command = Callable[..., None]

_UNITS = {"_ms": "MS", "_s": "SECONDS"}
"""Endings of field names that are units, and the name of such a value in the help."""


@dataclass(frozen=True)
class Spelled:
    """The form of a field on the command line.

    Attributes:
        options: the parameters of the command that give the field: by name, the type and the
            typer option. A type of bool is a flag; other types are None or empty by default.
        read: makes the field's value of the parameters' words and the names of the devices.
    """

    options: Mapping[str, tuple[Any, Any]]
    read: Callable[[Mapping[str, Any], Sequence[str]], Any]


def _one(name: str, kind: Any, help: str, metavar: str | None = None, flags: str = "") -> Any:
    """Return one parameter by name; its flag is the name unless ``flags`` says otherwise."""
    flags = flags or f"--{name.replace('_', '-')}"
    return {name: (kind, typer.Option(flags, metavar=metavar, help=help))}


def _word(name: str, kind: Any, help: str, metavar: str | None = None, flags: str = "") -> Spelled:
    """Return a field of one parameter, whose word is the field's value."""
    return Spelled(_one(name, kind, help, metavar, flags), lambda given, _: given[name])


def _size(name: str, help: str) -> Spelled:
    """Return a field in bytes that is given as a size with a unit."""
    return Spelled(_one(name, str | None, help, "SIZE"), lambda given, _: parse_bytes(given[name]))


def _loss_function(spec: str | None) -> Any:
    if spec is None:
        return None
    with extra("torch"):
        from placer.cli.model_arguments import load_function
    with users_code():
        return load_function(spec)


def _granularity(word: str) -> str | int:
    return int(word) if word.isdecimal() else word


# Fields that are not here become an option by the general rule. None: the field is no option.
SPELLED: dict[str, Spelled | None] = {
    "training": _word(
        "training",
        bool | None,
        "place a training step, or inference; by default a training step, or as profiled",
        flags="--training/--inference",
    ),
    "contiguous": _word(
        "contiguous",
        bool | None,
        "data may not leave a stage and come back to it; or it may",
        flags="--contiguous/--free",
    ),
    "pinned": Spelled(
        _one("pin", list[str], "the layer must be on the device; repeatable", "LAYER=DEVICE"),
        lambda given, names: shared_options.pins(names, given["pin"]),
    ),
    "forbidden": Spelled(
        _one(
            "forbid",
            list[str],
            "the layer must not be there; * for every layer; repeatable",
            "LAYER=DEVICE",
        ),
        lambda given, names: shared_options.bans(names, given["forbid"]),
    ),
    "colocated": None,
    "recompute": Spelled(
        _one(
            "recompute",
            bool,
            "where memory would not suffice otherwise, keep less and compute forward passes twice",
        )
        | _one(
            "recompute_on",
            list[str],
            "never, auto or always, for one device; repeatable",
            "DEVICE=WORD",
        ),
        lambda given, names: shared_options.recomputing(
            names, given["recompute"], given["recompute_on"]
        ),
    ),
    "generation": Spelled(
        _one("prompt_tokens", int | None, "objective generation: tokens of a prompt")
        | _one("new_tokens", int | None, "objective generation: tokens that are generated after it")
        | _one(
            "sequences_in_flight",
            int | None,
            "objective generation: generations at the same time; by default 1",
        ),
        lambda given, _: shared_options.generation(
            given["prompt_tokens"], given["new_tokens"], given["sequences_in_flight"]
        ),
    ),
    "optimizer": Spelled(
        _one("optimizer", str, "whose state counts in training: adam, sgd, ... or none"),
        lambda given, _: None if given["optimizer"] == "none" else given["optimizer"],
    ),
    "granularity": Spelled(
        _one("granularity", str, "how layers are cut: auto, blocks, submodule, fine or a depth"),
        lambda given, _: _granularity(given["granularity"]),
    ),
    "cache": Spelled(
        _one("cache", str | None, "where measurements are kept, and found again", "FOLDER")
        | _one("no_cache", bool, "measure everything, and keep nothing"),
        lambda given, _: shared_options.cache_folder(given["cache"], given["no_cache"]),
    ),
    "loss_fn": Spelled(
        _one(
            "loss", str | None, "package.module:function of output and target, in training", "NAME"
        ),
        lambda given, _: _loss_function(given["loss"]),
    ),
    "target": Spelled(
        _one(
            "target",
            str | None,
            "the target of the loss, for one micro-batch: 8:int64",
            "SHAPE[:DTYPE]",
        ),
        lambda given, _: shared_options.goal(given["target"], given["loss"]),
    ),
    "batch_options": Spelled(
        _one(
            "batch_options",
            str | None,
            'the batch dimension and the loss, as in \'{"inputs": 1, "reduction": "sum"}\'',
            "JSON",
        ),
        lambda given, _: BatchOptions.model_validate_json(given["batch_options"]),
    ),
    "batch_sizes": Spelled(
        _one(
            "batch_sizes",
            str | None,
            "objective step: micro-batch sizes to measure and choose from",
            "8,16",
        ),
        lambda given, _: shared_options.sample_counts(given["batch_sizes"]),
    ),
    "dtype": _word(
        "dtype",
        str | None,
        "of parameters and floating-point inputs, as bfloat16; by default the model's own",
    ),
    "reserve_bytes": _size(
        "reserve", "memory of each device for the CUDA context and libraries; by default 512MiB"
    ),
    "host_memory_bytes": _size(
        "host_memory", "host memory for parameters that do not fit on the devices; by default none"
    ),
    "disk_bytes": _size(
        "disk", "disk space for parameters that do not fit in --host-memory either; by default none"
    ),
    "disk_folder": _word(
        "disk_folder",
        str | None,
        "folder on whose disk parameters may rest, to measure how fast it is read",
        "FOLDER",
    ),
    "compile": _word("compile", bool, "measure stages as they run under torch.compile"),
    "timer": None,
}


class Words(Generic[O]):
    """The words that a command line gives for options.

    Attributes:
        given: by parameter of the command.
    """

    def __init__(self, kind: type[O], given: Mapping[str, Any]) -> None:
        self._kind = kind
        self.given = given

    def read(self, devices: Sequence[str] = ()) -> O:
        """Return the options.

        Args:
            devices: the names of the devices that words may name.

        Raises:
            InputError: a word cannot be used.
        """
        try:
            return self._kind(**self._fields(self._kind, devices))
        except InputError as error:
            raise InputError(self._in_words(str(error))) from error

    def _in_words(self, message: str) -> str:
        """Return a message with the option in place of the field that it begins with."""
        for path, option in _option_of_path(self._kind, self._kind.__name__):
            if message.startswith(f"{path}: "):
                return f"{option}{message.removeprefix(path)}"
        return message

    def _fields(self, kind: type[BaseModel], devices: Sequence[str]) -> dict[str, Any]:
        """Return the values of the fields that the command line gives."""
        values: dict[str, Any] = {}
        for name, field in kind.model_fields.items():
            nested = _nested(name, field)
            if nested is not None:
                values |= {name: inner} if (inner := self._fields(nested, devices)) else {}
                continue
            spelled = _spelled(name, field)
            if spelled is None or not spelled.options.keys() <= self.given.keys():
                continue
            if any(
                self.given[option] != _default(type_, field)
                for option, (type_, _) in spelled.options.items()
            ):
                values[name] = spelled.read(self.given, devices)
        return values


def _option_of_path(kind: type[BaseModel], path: str) -> Iterator[tuple[str, str]]:
    """Yield the path of each field that is one option, and the option: ``--time-limit``."""
    for name, field in kind.model_fields.items():
        if (nested := _nested(name, field)) is not None:
            yield from _option_of_path(nested, f"{path}.{name}")
        elif (spelled := _spelled(name, field)) is not None and len(spelled.options) == 1:
            ((_, info),) = spelled.options.values()
            # typer keeps the first flag where it keeps a default
            yield f"{path}.{name}", info.default


def parameters(
    kind: type[BaseModel], leave_out: frozenset[str] = frozenset()
) -> Iterator[inspect.Parameter]:
    """Yield the parameters of a command that give the fields of options."""
    for name, field in kind.model_fields.items():
        if name in leave_out:
            continue
        if (nested := _nested(name, field)) is not None:
            yield from parameters(nested, leave_out)
        elif (spelled := _spelled(name, field)) is not None:
            for option, (type_, info) in spelled.options.items():
                yield parameter(option, type_, info, _default(type_, field))


def parameter(name: str, type_: Any, info: Any, default: Any) -> inspect.Parameter:
    """Return a command's parameter with its typer option."""
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[type_, info]
    )


def expanded(
    kind: type[Wire] | None = None, leave_out: frozenset[str] = frozenset()
) -> Callable[[Command], Command]:
    """Return a decorator that gives a command the options of its groups.

    The command's parameter ``words`` stands for the fields of ``kind``, and each parameter whose
    type is a dataclass stands for the fields of that dataclass.

    Args:
        kind: the options object whose fields become options.
        leave_out: fields that do not.
    """

    def decorate(command: Command) -> Command:
        groups: dict[str, tuple[Callable[..., Any], list[inspect.Parameter]]] = {}
        shown: list[inspect.Parameter] = []
        for own in inspect.signature(command, eval_str=True).parameters.values():
            if own.name == "words" and kind is not None:
                groups["words"] = (partial(_words, kind), list(parameters(kind, leave_out)))
                shown += groups["words"][1]
            elif is_dataclass(own.annotation) and isinstance(own.annotation, type):
                groups[own.name] = (own.annotation, list(_members(own.annotation)))
                shown += groups[own.name][1]
            else:
                shown.append(own.replace(kind=inspect.Parameter.KEYWORD_ONLY))

        @wraps(command)
        def run(**given: Any) -> None:
            for group, (make, members) in groups.items():
                inner = {one.name: given.pop(one.name, one.default) for one in members}
                given[group] = make(**inner)
            command(**given)

        show(run, shown)
        return run

    return decorate


def show(command: Any, parameters: Sequence[inspect.Parameter]) -> None:
    """Give a command the signature that typer makes its options from."""
    command.__signature__ = inspect.Signature(list(parameters))
    command.__annotations__ = {one.name: one.annotation for one in parameters}


def _words(kind: type[Wire], **given: Any) -> Words[Any]:
    return Words(kind, given)


def _members(group: Any) -> Iterator[inspect.Parameter]:
    """Yield the fields of a dataclass of typer options as parameters."""
    types = get_type_hints(group, include_extras=True)
    for field in fields(group):
        default = field.default if field.default is not MISSING else []
        kind = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(field.name, kind, default=default, annotation=types[field.name])


def _nested(name: str, field: FieldInfo) -> type[BaseModel] | None:
    """Return the type of a field whose own fields are options, or None."""
    annotation: Any = field.annotation
    is_nested = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation if is_nested and name not in SPELLED else None


def _spelled(name: str, field: FieldInfo) -> Spelled | None:
    """Return the form of a field: its own, or by the general rule."""
    if name in SPELLED:
        return SPELLED[name]
    type_, least, choices = _plain(field)
    flag, metavar = name, None
    for ending, unit in _UNITS.items():
        if name.endswith(ending):
            flag, metavar = name.removesuffix(ending), unit
            break
    text = _help(field) + (f": {', '.join(choices[:-1])} or {choices[-1]}" if choices else "")
    option = typer.Option(f"--{flag.replace('_', '-')}", metavar=metavar, min=least, help=text)
    return Spelled({name: (type_, option)}, lambda given, _: given[name])


def _plain(field: FieldInfo) -> tuple[Any, float | None, tuple[str, ...]]:
    """Return the type of a field for typer, its lower bound, and the words that it may be."""
    annotation: Any = field.annotation
    metadata = list(field.metadata)
    is_optional = False
    if get_origin(annotation) in (Union, UnionType):
        parts = [part for part in get_args(annotation) if part is not type(None)]
        is_optional = len(parts) < len(get_args(annotation))
        annotation = parts[0]
    if get_origin(annotation) is Annotated:
        annotation, *inner = get_args(annotation)
        metadata += [bound for info in inner for bound in getattr(info, "metadata", [info])]
    least = next((bound.ge for bound in metadata if hasattr(bound, "ge")), None)
    choices: tuple[str, ...] = ()
    if get_origin(annotation) is Literal:
        annotation, choices = str, get_args(annotation)
    return (annotation | None if is_optional else annotation), least, choices


def _help(field: FieldInfo) -> str:
    """Return the first sentence of a field's description, as the help texts are written."""
    first = (field.description or "").split("\n\n")[0].removesuffix(".").replace("``", "")
    return first[:1].lower() + first[1:] if first[1:2].islower() else first


def _default(type_: Any, field: FieldInfo) -> Any:
    """Return the default of a command's parameter."""
    if type_ is bool:
        return False
    if get_origin(type_) is list:
        return []
    return None if type(None) in get_args(type_) else field.default
