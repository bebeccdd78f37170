"""Messages about missing optional packages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from placer.errors import MissingExtraError


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Convert a failed import inside to an error that names the missing extra.

    Args:
        name: the extra that contains the imported packages.

    Raises:
        MissingExtraError: if a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = f"{error.name} is not installed: pip install 'torch-placer[{name}]'"
        raise MissingExtraError(missing) from error


def need_torch() -> None:
    """Import torch, for a package that requires it in every module.

    Raises:
        MissingExtraError: if torch is not installed.
    """
    with extra("torch"):
        import_module("torch")
