"""The tensors of checkpoint files, mapped into memory: a tensor is read when it is used."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from placer.errors import InputError, kind_of
from placer.utils.extras import extra
from placer.utils.units import listed

SAFETENSORS = ".safetensors"
TORCH = (".bin", ".pt", ".pth")
INDEX = ".index.json"

_USUAL_NAMES = ("model", "pytorch_model", "diffusion_pytorch_model")
"""Names of the weights' file in folders that hold others, such as the state of an optimizer."""

_STATE_KEYS = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which training programs save the model and the state of the optimizer."""

_KNOWN_LIBRARIES = ("torchao",)
"""Libraries that register the classes of their weights with torch when they are imported."""


def read_checkpoint(path: str | PathLike[str]) -> dict[str, Any]:
    """Return what a checkpoint holds, by key, in the order of its files.

    Args:
        path: a file of safetensors or torch, an index of shards, or a folder with one of them.

    Returns:
        Tensors on the host whose memory is mapped from the files, and other values of torch files.

    Raises:
        InputError: there is no checkpoint, or a file is missing or cannot be read.
        MissingExtraError: safetensors is not installed.
    """
    if not isinstance(path, str | PathLike):
        raise InputError(
            f"path is {kind_of(path)}; give the path of a checkpoint's file or of its folder"
        )
    chosen = _chosen(Path(path))
    metadata: dict[str, str] = {}
    read = _read_shards if chosen.name.endswith(INDEX) else _read
    values = read(chosen, metadata)
    return _with_torchao(values, metadata, chosen) if "tensor_names" in metadata else values


def _chosen(path: Path) -> Path:
    """Return the file, or the index of shards, that holds the weights."""
    if not path.exists():
        raise InputError(
            f"{path} does not exist; give a checkpoint's file or its folder on this machine"
        )
    if not path.is_dir():
        return path
    for suffixes in ((SAFETENSORS,), TORCH):
        indices = [one for suffix in suffixes for one in path.glob(f"*{suffix}{INDEX}")]
        files = [one for suffix in suffixes for one in path.glob(f"*{suffix}")]
        for found in (indices, files):
            if found:
                return _only(path, sorted(found))
    raise InputError(
        f"{path} has no checkpoint; give a folder with {SAFETENSORS}, {', '.join(TORCH[:-1])} or "
        f"{TORCH[-1]} files"
    )


def _only(folder: Path, found: Sequence[Path]) -> Path:
    """Return the file of a usual name, or the only file."""
    usual = [file for file in found if Path(file.name.removesuffix(INDEX)).stem in _USUAL_NAMES]
    for files in (found, usual):
        if len(files) == 1:
            return files[0]
    names = listed([file.name for file in found], 8)
    raise InputError(
        f"{folder} has {len(found)} checkpoints ({names}); give "
        "the path of one file, or of the index (*.index.json) of shards"
    )


def _read_shards(index: Path, metadata: dict[str, str]) -> dict[str, Any]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = dict.fromkeys(weight_map.values())
        paths = {shard: index.parent / shard for shard in shards}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{index} is not an index of shards: {error!r}; download it again"
        ) from error
    if missing := [shard for shard, path in paths.items() if not path.is_file()]:
        raise InputError(
            f"{index.parent} lacks {_listed(missing)}, which {index.name} names; download all "
            "shards"
        )
    values: dict[str, Any] = {}
    for shard in sorted(paths):
        inside = _read(paths[shard], metadata)
        listed = {key for key, own in weight_map.items() if own == shard}
        if absent := sorted(listed - inside.keys()):
            raise InputError(
                f"{paths[shard]} lacks {_listed(absent)}, which {index.name} places there; "
                "download the shard and the index again"
            )
        # a tied weight may be in several shards
        values.update((key, value) for key, value in inside.items() if key in listed)
    return values


def _read(file: Path, metadata: dict[str, str]) -> dict[str, Any]:
    """Return what a file holds; the metadata of safetensors are added to the given ones."""
    if file.suffix == SAFETENSORS:
        return dict(_read_safetensors(file, metadata))
    if file.suffix in TORCH:
        return _read_torch(file)
    raise InputError(
        f"{file} is not a checkpoint of a known format; give a {SAFETENSORS}, {', '.join(TORCH)} or"
        f" *{INDEX} file, or their folder"
    )


def _read_safetensors(file: Path, metadata: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    with extra("safetensors"):
        from safetensors import SafetensorError, safe_open
    try:
        # Tensors of the CPU are views of the mapped file. Other devices would get copies at once,
        # before the checkpoint is known to fit the model.
        with safe_open(str(file), framework="pt", device="cpu") as opened:
            metadata.update(opened.metadata() or {})
            order = getattr(opened, "offset_keys", opened.keys)
            for key in order():
                yield key, opened.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{file} cannot be read as safetensors: {error}; it may be incomplete: download it "
            "again"
        ) from error


def _with_torchao(
    values: dict[str, Any], metadata: Mapping[str, str], file: Path
) -> dict[str, Any]:
    """Return the values with quantised weights put together from the tensors that they wrap.

    torchao lists such weights and their classes in the metadata of safetensors.

    Source: ``torchao.prototype.safetensors`` (read for torchao 0.18).
    """
    try:
        library = import_module("torchao.prototype.safetensors.safetensors_support")
        weights, others = library.unflatten_tensor_state_dict(values, metadata)
    except ImportError as error:
        raise InputError(
            f"{file} holds weights that torchao quantised, and torchao cannot be imported "
            f"({error}); install the version that saved it"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{file} holds weights that torchao quantised, which the installed version cannot read:"
            f" {error}; install the version that saved it"
        ) from error
    return {**weights, **others}


def _read_torch(file: Path) -> dict[str, Any]:
    try:
        content = _load_torch(file)
    except pickle.UnpicklingError as error:
        raise _refused_classes(file, error) from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        if "mmap can only be used" in str(error):
            raise InputError(
                f"{file} is not a zip file, as torch.save has written since version 1.6, so it "
                "cannot be read tensor by tensor; load it once with torch.load and save it again "
                "with torch.save"
            ) from error
        raise InputError(
            f"{file} cannot be read as a checkpoint of torch: {error}; it may be incomplete: save "
            "or download it again"
        ) from error
    nested = content if _is_state(content) else None
    if nested is None and isinstance(content, Mapping):
        nested = next((content[key] for key in _STATE_KEYS if _is_state(content.get(key))), None)
    if nested is None:
        held = (
            f"a dict of {_listed(list(content))}"
            if isinstance(content, dict)
            else (kind_of(content))
        )
        raise InputError(
            f"{file} holds {held}, not the weights of a model; save model.state_dict() with "
            "torch.save, and load that file"
        )
    return dict(nested)


def _load_torch(file: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError:
        if not _import_libraries(file):
            raise
    return torch.load(file, map_location="cpu", mmap=True, weights_only=True)


def _import_libraries(file: Path) -> bool:
    """Import the libraries of quantised weights in a file; return whether there are any.

    Source: torchao, "Serialization"; torch.serialization.add_safe_globals (read for torchao 0.18,
    torch 2.13).
    """
    imported = False
    for name in torch.serialization.get_unsafe_globals_in_checkpoint(file):
        library = name.partition(".")[0]
        if library in _KNOWN_LIBRARIES:
            try:
                import_module(name.rpartition(".")[0])
            except ImportError as error:
                raise InputError(
                    f"{file} holds weights of the class {name}, which cannot be imported "
                    f"({error}); install the version of {library} that saved it"
                ) from error
            imported = True
    return imported


def _refused_classes(file: Path, error: Exception) -> InputError:
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # not a checkpoint at all
        names = []
    if not names:
        return InputError(f"{file} cannot be read as a checkpoint of torch: {error}")
    return InputError(
        f"{file} holds objects of {_listed(names)}, which could run code when they are loaded. If "
        "you trust the file, allow them with torch.serialization.add_safe_globals; otherwise ask "
        "for a file of safetensors"
    )


def _is_state(content: Any) -> bool:
    return (
        isinstance(content, Mapping)
        and all(isinstance(key, str) for key in content)
        and any(isinstance(value, Tensor) for value in content.values())
    )


def _listed(names: Sequence[Any], count: int = 4) -> str:
    shown = ", ".join(map(str, names[:count]))
    return f"{shown} and {len(names) - count} more" if len(names) > count else shown
