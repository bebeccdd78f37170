"""The sizes of weights in safetensors files, from their headers; no weights are read.

A file begins with the length of its header (8 bytes, little-endian) and the header as JSON::

    {"model.norm.weight": {"dtype": "BF16", "shape": [4096], "data_offsets": [0, 8192]}, ...}

Source: https://huggingface.co/docs/safetensors, section Format (read for safetensors 0.8).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from placer.errors import InputError
from placer.estimator.device_sizes import DEVICE_TYPE
from placer.schema import Edge, Layer, Profile

SUFFIX = ".safetensors"
INDEX = "model.safetensors.index.json"

_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000
"""Largest header that the format allows."""

_NUMBER = re.compile(r"\.(\d+)\.")


def is_weight_file(path: Path) -> bool:
    """Return whether a path is a safetensors file, or a folder with such files."""
    if path.is_dir():
        return any(path.glob(f"*{SUFFIX}"))
    return path.suffix == SUFFIX


def weights_profile(path: Path) -> Profile:
    """Return a profile of the weights alone, one layer for each numbered block or other module.

    Args:
        path: a safetensors file, or a folder of shards.

    Raises:
        InputError: a file cannot be read, has no valid header, or a shard is missing.
    """
    sizes: dict[str, int] = {}
    for file in _files(path):
        sizes.update(tensor_sizes(file))
    if not sizes:
        raise InputError(f"{path} holds no tensors, so there is nothing to place")
    blocks: dict[str, int] = {}
    for name, size in sizes.items():
        block = block_of(name)
        blocks[block] = blocks.get(block, 0) + size
    names = sorted(blocks, key=_order)
    layers = tuple(
        Layer(name=name, forward_ms={DEVICE_TYPE: 0.0}, param_bytes=blocks[name]) for name in names
    )
    edges = tuple(Edge(source=one, targets=(other,), bytes=0) for one, other in pairwise(names))
    return Profile(model=path.name, layers=layers, edges=edges)


def tensor_sizes(file: Path) -> dict[str, int]:
    """Return the size in bytes of each tensor in a safetensors file.

    Raises:
        InputError: the file cannot be read or has no valid header.
    """
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            if not 0 < length <= _MOST_HEADER_BYTES:
                raise InputError(
                    f"{file} is not a safetensors file: its header would have {length} bytes"
                )
            header = json.loads(opened.read(length))
            return dict(_sizes(header))
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{file} is not a safetensors file: {error}") from error


def block_of(name: str) -> str:
    """Return the layer of a tensor: up to its first number, or else its module.

    ``model.layers.3.mlp.up.weight`` belongs to ``model.layers.3``; ``model.norm.weight`` to
    ``model.norm``.
    """
    match = _NUMBER.search(name)
    if match is not None:
        return name[: match.end() - 1]
    return name.rpartition(".")[0] or name


def _sizes(header: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            if not 0 <= start <= end:
                raise ValueError(f"tensor {name!r} has the offsets {start} and {end}")
            yield name, end - start


def _files(path: Path) -> Iterable[Path]:
    if not path.is_dir():
        return [path]
    index = path / INDEX
    if not index.exists():
        return sorted(path.glob(f"*{SUFFIX}"))
    try:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index} is not an index of shards: {error}") from error
    if missing := [name for name in shards if not (path / name).is_file()]:
        raise InputError(
            f"{path} lacks {missing[0]}, which its index names"
            f"{f', and {len(missing) - 1} more' if len(missing) > 1 else ''}; download all shards"
        )
    return [path / name for name in shards]


def _order(name: str) -> tuple[int, list[tuple[bool, int, str]]]:
    """Return the place of a layer: embeddings, then numbered blocks, then the rest.

    Headers are sorted by name, not by use. The order matters only for the names of layers that
    share a device.
    """
    parts = [
        (part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in name.split(".")
    ]
    is_first = any(word in name for word in ("embed", "wte", "wpe", "patch"))
    is_numbered = any(is_number for is_number, _, _ in parts)
    return (1 if is_numbered else 0 if is_first else 2), parts
