"""What is said where an optional package is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from placer.errors import MissingExtraError

__all__ = ["extra", "need_torch"]


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Tell which extra is missing when an import fails.

    Args:
        name: of the extra that has what is imported.

    Raises:
        MissingExtraError: a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = f"{error.name} is not installed: pip install 'torch-placer[{name}]'"
        raise MissingExtraError(missing) from error


def need_torch() -> None:
    """Import torch, for a package whose every module needs it.

    Raises:
        MissingExtraError: torch is not installed.
    """
    with extra("torch"):
        import_module("torch")
