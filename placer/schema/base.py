"""What every wire type shares: its configuration, the names and units of its fields, and the checks
of lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    StringConstraints,
    ValidationError,
)

from placer.errors import InputError
from placer.schema.faults import first_fault, nearest

SCHEMA_VERSION: Literal["1"] = "1"
"""The version of every wire type; a reader refuses one that it does not know."""

MERGED = "+"
"""Joins the names of layers that were merged because they depend on one another both ways."""
WHOLE = "(model)"
"""The one layer of a model that calls no module."""

V = TypeVar("V")
M = TypeVar("M", bound=BaseModel)

MAX_LAYERS = 100_000
MAX_DEVICES = 1_024

FIRST = FailFast()
"""Of a list, only the first faulty element is reported: a million faults would take a gigabyte to
describe."""

Name = Annotated[str, StringConstraints(min_length=1, max_length=16_384)]
"""Of a layer, a device and others; a layer that was merged of many modules names them all."""
Milliseconds = Annotated[float, Field(ge=0, le=1e9)]
Bytes = Annotated[int, Field(ge=0, le=2**60)]


def in_order(named: dict[str, V]) -> dict[str, V]:
    """Sorted by name, so that equal questions are written, and hashed, alike."""
    return named if len(named) < 2 else dict(sorted(named.items()))


IN_ORDER = AfterValidator(in_order)
TimesMs = Annotated[dict[Name, Milliseconds], Field(max_length=64), IN_ORDER]

Objective = Literal["throughput", "step", "latency", "memory", "devices"]
"""What is made small: the bottleneck (ms), the time of a whole batch (ms), one sample's critical
path (ms), the largest memory use (bytes), or the number of devices that keep within a
bottleneck."""

Schedule = Literal["fill-drain", "1f1b", "zero-bubble", "interleaved"]
"""The order of micro-batches in training, drawn in ``placer.schedule``."""
ScheduleChoice = Literal["auto", Schedule]
"""``auto``: the best for the batch, under objective ``step``."""

Steps = Literal["alone", "in-a-row"]
"""Which step objective ``step`` makes short: one from idle devices to idle devices, or one of many,
as in a training
loop: a device begins the next step when its own part of this one is over, its optimizer
included."""

Transfers = Literal["added", "overlapped"]
Recompute = Literal["never", "auto", "always"]
"""Whether a device runs forwards once more before each backward pass; ``auto``: where memory would
not do otherwise."""

Limiting = Literal["memory", "link", "layer", "work"]
Status = Literal["optimal", "feasible", "infeasible", "unknown"]


class Wire(BaseModel):
    """A type that travels: unknown fields and numbers that are none are refused; it never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def __init__(self, **fields: Any) -> None:
        """Check what a program gives.

        Raises:
            InputError: a field that is not known, is missing, or contradicts another.
        """
        with _told(type(self)):
            super().__init__(**fields)

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # else pydantic reads by way of it, slowly

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        """The type from what JSON holds, or from one of its own; ``options`` are pydantic's.

        Raises:
            InputError: as for a field of the constructor, or it is no dictionary.
        """
        with _told(cls):
            return super().model_validate(obj, **options)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        """The type from JSON; ``options`` are pydantic's.

        Raises:
            InputError: as for a field of the constructor, or it is no JSON.
        """
        with _told(cls):
            return super().model_validate_json(json_data, **options)


@contextmanager
def _told(kind: type[BaseModel]) -> Iterator[None]:
    """Tells what pydantic finds wrong as Placer does; its own error, with every place, is the
    cause.
    """
    try:
        yield
    except ValidationError as error:
        raise InputError(first_fault(error, kind)) from error


def read_json(kind: type[M], text: str | bytes, *, strict: bool = False) -> M:
    """As ``kind.model_validate_json``, for those who tell of every fault.

    Args:
        kind: of what the JSON holds.
        text: the JSON.
        strict: whether ``"1"`` is no number.

    Raises:
        ValidationError: pydantic's own, with every place.
    """
    read: M = kind.__pydantic_validator__.validate_json(text, strict=strict or None)
    return read


def refuse_duplicates(kind: str, names: Sequence[str]) -> None:
    """Raises ValueError for the first name that is listed twice."""
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
    """Raises ValueError for the first name that is not among the known ones, with the nearest of
    these.
    """
    known = known if isinstance(known, (dict, set)) else set(known)
    for name in names:
        if name not in known:
            raise ValueError(f"{where}: there is no {kind} {name!r}{nearest(name, sorted(known))}")
