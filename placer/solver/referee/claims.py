"""What the referee says of a claim that does not hold: what is claimed, and what is true."""

from __future__ import annotations

from math import isclose

from placer.errors import PlacementError


def require(holds: bool, otherwise: str) -> None:
    """Raise PlacementError, with these words, where something does not hold."""
    if not holds:
        raise PlacementError(otherwise)


def equal(what: str, claimed: object, true: object) -> None:
    """Raise PlacementError where what is claimed is not what is true."""
    require(claimed == true, f"{what}: {claimed!r} is claimed, {true!r} is true")


def near(what: str, claimed: float, true: float, absolute: float = 0.0) -> None:
    """Return whether two times are equal up to rounding."""
    require(close(claimed, true, absolute), f"{what}: {claimed!r} is claimed, {true!r} is true")


def close(one: float, other: float, absolute: float = 0.0) -> bool:
    """Return whether two times are the same but for rounding, up to a relative 1e-9."""
    return isclose(one, other, abs_tol=absolute)
