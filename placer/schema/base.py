"""The common base of all wire types: configuration, names, units and list checks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    StringConstraints,
    ValidationError,
    create_model,
)

from placer.errors import InputError
from placer.schema.faults import first_fault, nearest
from placer.schema.versions import SCHEMA_VERSION as SCHEMA_VERSION
from placer.schema.versions import upgraded, upgraded_json, validated
from placer.utils.option_checks import refuse_converted

MERGED = "+"
"""Separator in names of merged layers, which depended on one another in both directions."""
WHOLE = "(model)"
"""Name of the only layer of a model without submodule calls."""

V = TypeVar("V")
M = TypeVar("M", bound=BaseModel)

MAX_LAYERS = 100_000
MAX_DEVICES = 1_024

FIRST = FailFast()
"""Reports only the first faulty element of a list: describing a million faults would take a
gigabyte."""

Name = Annotated[str, StringConstraints(min_length=1, max_length=16_384)]
"""A name of a layer, a device and others. A merged layer's name lists all of its modules."""
LONGEST_MS = 1e9
"""The longest time of a layer, a transfer or a device, 12 days: larger numbers are mistakes."""
Milliseconds = Annotated[float, Field(ge=0, le=LONGEST_MS)]
LARGEST_BYTES = 2**60
"""The largest sum of memory figures, so that sums stay exact in 64-bit integers."""
Bytes = Annotated[int, Field(ge=0, le=LARGEST_BYTES)]


def in_order(named: dict[str, V]) -> dict[str, V]:
    """Return the dictionary sorted by key, so that equal requests serialise and hash equally."""
    return named if len(named) < 2 else dict(sorted(named.items()))


IN_ORDER = AfterValidator(in_order)
TimesMs = Annotated[dict[Name, Milliseconds], Field(max_length=64), IN_ORDER]

Objective = Literal["throughput", "step", "latency", "generation", "memory", "devices"]
"""The minimised quantity: the bottleneck (ms), the time of a whole batch (ms), the critical path of
one micro-batch (ms), the time of a generation (ms), the largest memory use (bytes), or the number
of devices within a bottleneck."""

Schedule = Literal["fill-drain", "1f1b", "zero-bubble", "interleaved"]
"""The order of micro-batches in training, drawn in ``placer.schedule``."""
ScheduleChoice = Literal["auto", Schedule]
"""A schedule, or ``auto``: the best one for the batch, under the objective ``step``."""

StepKind = Literal["isolated", "steady-state"]
"""The step that the objective ``step`` minimises: an isolated step, from idle devices to idle
devices, or a steady-state step of a training loop. In the latter, a device begins the next step
when its own part of this one, with its optimizer, is done."""

Transfers = Literal["added", "overlapped"]
Recompute = Literal["never", "auto", "always"]
"""Whether a device runs forward again before each backward pass; ``auto``: only if memory requires
it."""

Replicas = Literal["never", "auto", "by-stage"]
"""Whether stages may be replicated; ``auto``: where this makes the objective smaller."""

FormatName = Literal[
    "accelerate",
    "deepspeed",
    "llama.cpp",
    "megatron",
    "pipedream",
    "pipelining",
    "piper",
    "torchgpipe",
    "torchtitan",
    "vllm",
]
"""A format in which another engine takes a placement; ``placer.exports`` writes it."""

StatePlace = Literal["device", "host"]
"""Where an optimizer's state is between steps: with its parameters, or in pinned host memory."""

StateChoice = Literal["device", "host", "auto"]
"""The place of optimizer state that is asked for; ``auto`` for the host if nothing fits else."""

Tier = Literal["host", "disk"]
"""Where weights rest between passes if not on a device: in the host's memory, or on its disk."""

LEAST_EXPERT_BYTES = 1 << 31
"""Least bytes of resting experts of which a pass copies the chosen ones alone: a recorded pass
copies 2 GiB over a link of 50 GB/s in 40 ms, about as long as the host needs to issue a pass of 32
layers through hooks."""


def copies_chosen_experts(expert_bytes: int) -> bool:
    """Return whether a pass of a generation copies only the experts that its tokens choose.

    Execution and costs both follow it.

    Args:
        expert_bytes: of all experts of a model that rest off their device.
    """
    return expert_bytes >= LEAST_EXPERT_BYTES


Limiting = Literal["memory", "link", "layer", "compute"]
Status = Literal["optimal", "feasible", "infeasible", "unknown"]
"""``optimal``: the gap is at most ``PROVEN_GAP``; ``feasible``: it is larger."""
PROVEN_GAP = 1e-6
"""Relative gap up to which a placement counts as optimal: one part in a million."""


class Wire(BaseModel):
    """An immutable wire type that rejects unknown fields and non-finite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def __init__(self, **fields: Any) -> None:
        """Create the object from validated fields.

        Raises:
            InputError: if a field is unknown or missing, has another type, or contradicts another.
        """
        # callers see Placer's InputError instead of pydantic's ValidationError
        with _told(type(self)):
            super().__init__(**fields)
        _refuse_conversions(type(self).__name__, fields, self)

    # without it, pydantic validates JSON through __init__, slowly
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """Return the object from decoded JSON or from an instance; ``options`` are pydantic's.

        JSON of an older version is upgraded.

        Raises:
            InputError: as for the constructor, or if ``obj`` is not a dictionary.
        """
        validate = partial(super().model_validate, **options)
        with _told(cls):
            return validated(validate, obj, lambda content: upgraded(content, cls))

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """Return the object from JSON; ``options`` are pydantic's.

        JSON of an older version is upgraded.

        Raises:
            InputError: as for the constructor, or if the text is not JSON.
        """
        validate = partial(super().model_validate_json, **options)
        with _told(cls):
            return validated(validate, json_data, lambda text: upgraded_json(text, cls))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy of the object with some fields changed.

        Text, lists and dictionaries are validated as by the constructor, so a nested object may be
        given as a dictionary. Objects and numbers, and rules about several fields, are not.

        Args:
            update: the new value of each changed field.
            deep: whether to copy nested objects, too.

        Raises:
            InputError: if a field is unknown, or a text, list or dictionary is invalid.
        """
        changed = dict(update or {})
        for name, value in changed.items():
            if name not in type(self).model_fields:
                known = nearest(name, type(self).model_fields)
                raise InputError(f"{type(self).__name__}.{name}: there is no such field{known}")
            if _is_decoded(value):
                changed[name] = _field_of(type(self), name, value)
        return super().model_copy(update=changed, deep=deep)

    def to_json(self) -> str:
        """Return the object as readable JSON."""
        return json.dumps(self.model_dump(mode="json"), indent=1)


def _is_decoded(value: Any) -> bool:
    """Return whether a value may come from JSON instead of from a schema type."""
    if isinstance(value, tuple):
        return any(isinstance(one, dict | list) for one in value)
    return isinstance(value, str | list | dict)


def _field_of(kind: type[BaseModel], name: str, value: Any) -> Any:
    """Return a validated value of one field.

    Raises:
        InputError: if the value is invalid.
    """
    alone = _field_model(kind, name)
    with _told(alone):
        made = getattr(alone.model_validate({name: value}), name)
    _refuse_conversions(f"{kind.__name__}.{name}", value, made)
    return made


@cache
def _field_model(kind: type[BaseModel], name: str) -> type[BaseModel]:
    """Return a type of the same name with only this field."""
    field = kind.model_fields[name]
    fields: dict[str, Any] = {name: (field.annotation, field)}
    made: type[BaseModel] = create_model(kind.__name__, __config__=kind.model_config, **fields)
    return made


def _refuse_conversions(path: str, given: Any, made: Any) -> None:
    """Raise an InputError for the first text or flag that became a number, or the reverse."""
    if isinstance(given, Mapping):
        for name, one in given.items():
            inside = made.get(name) if isinstance(made, Mapping) else getattr(made, name, None)
            # Most fields of a profile are unchanged by validation.
            if one is not inside:
                _refuse_conversions(f"{path}.{name}", one, inside)
    elif isinstance(given, tuple | list) and isinstance(made, tuple | list):
        # Objects were validated when they were made, and a list may have 100,000 of them.
        if given and not isinstance(given[0], BaseModel):
            for place, (one, inside) in enumerate(zip(given, made, strict=False)):
                if one is not inside:
                    _refuse_conversions(f"{path}.{place}", one, inside)
    else:
        refuse_converted(path, given, made)


@contextmanager
def _told(kind: type[BaseModel]) -> Iterator[None]:
    """Convert pydantic's errors to InputError; the original, with all locations, is the cause."""
    try:
        yield
    except ValidationError as error:
        raise InputError(first_fault(error, kind)) from error


def read_json(kind: type[M], text: str | bytes, *, strict: bool = False) -> M:
    """Return ``kind`` from JSON, with pydantic's own error, for callers that report every fault.

    JSON of an older version is upgraded.

    Args:
        kind: the type to read.
        text: the JSON.
        strict: whether to reject ``"1"`` as a number.

    Raises:
        ValidationError: pydantic's error with all locations.
    """
    validate = partial(kind.__pydantic_validator__.validate_json, strict=strict or None)
    read: M = validated(validate, text, lambda older: upgraded_json(older, kind))
    return read


def refuse_duplicates(kind: str, names: Sequence[str]) -> None:
    """Raise a ValueError for the first repeated name."""
    if len(set(names)) == len(names):
        return
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{kind} {name!r} is listed twice")
        seen.add(name)


def refuse_unknown(
    where: str, names: Iterable[str], known: Iterable[str], kind: str = "layer"
) -> None:
    """Raise a ValueError for the first unknown name, with the most similar known one.

    Args:
        where: the start of the message.
        names: to check.
        known: the existing names.
        kind: what they name, for the message (default ``layer``).
    """
    # a set at most once: requests check up to 100,000 names
    known = known if isinstance(known, (dict, set)) else set(known)
    for name in names:
        if name not in known:
            raise ValueError(f"{where}: there is no {kind} {name!r}{nearest(name, sorted(known))}")


def module_paths(layer: str) -> list[str]:
    """Return the path of each call in a layer's name: ``a``, ``b`` and ``b`` for ``a+b+b@1``."""
    return [call.partition("@")[0] for call in layer.split(MERGED)]


def is_part(name: str, of: str) -> bool:
    """Return whether a dotted name is another or names a part of it; all are parts of ``""``."""
    return not of or name == of or name.startswith(f"{of}.")


def paths_around(path: str, most_steps: int = -1) -> list[str]:
    """Return the paths of the modules around a module, innermost first; the model's is ``""``.

    Args:
        path: of the module.
        most_steps: the maximum steps of a returned path; by default all are returned.
    """
    steps = path.split(".", most_steps)
    return [".".join(steps[:depth]) for depth in reversed(range(len(steps)))] if path else []
