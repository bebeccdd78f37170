"""Processes started together, as ``torch.multiprocessing.spawn`` starts them, but forks of one that
imported torch."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Mapping
from typing import Any

from forks import TORCH
from torch.multiprocessing.spawn import start_processes


def spawn(
    function: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True
) -> Any:
    """Call ``function(rank, *args)`` in so many processes, in the environment of now."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(TORCH)
    given = (dict(os.environ), function, args)
    return start_processes(_call, given, nprocs, join, start_method="forkserver")  # type: ignore[no-untyped-call]


def _call(
    rank: int, environment: Mapping[str, str], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    gc.freeze()
    os.environ.clear()
    os.environ.update(environment)
    function(rank, *args)
