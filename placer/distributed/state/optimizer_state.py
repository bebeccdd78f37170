"""Optimizer state by parameter name, in the layout of torch's distributed checkpoints.

    state.NAME.KEY           of one parameter; absent if it never had a gradient
    param_groups.NAME.KEY    the settings of the parameter's group

Any number of processes can read this layout. A process without parameters has no entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from placer.errors import InputError


def flat(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state to save.

    Args:
        module: the parameters under their names.
        optimizer: of these parameters.
    """
    names = _names(module)
    found: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = _known(names, parameter)[0]
            found |= {
                f"state.{name}.{key}": value
                for key, value in _leaves(optimizer.state.get(parameter, {}))
            }
            found |= {
                f"param_groups.{name}.{key}": value
                for key, value in group.items()
                if key != "params"
            }
    return found


def places(
    module: nn.Module, optimizer: torch.optim.Optimizer, kept: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the buffers to read a checkpoint's optimizer state into.

    Args:
        module: the parameters under their names.
        optimizer: of these parameters.
        kept: the checkpoint's metadata, by key.

    Raises:
        InputError: if it has no entry for a parameter.
    """
    names = _names(module)
    found: dict[str, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = _saved(_known(names, parameter), kept)
            for key, stored in kept.items():
                if key.startswith((f"state.{name}.", f"param_groups.{name}.")):
                    is_tensor = isinstance(stored, TensorStorageMetadata)
                    found[key] = _empty(stored, parameter.device) if is_tensor else None
    return found


def put(module: nn.Module, optimizer: torch.optim.Optimizer, loaded: Mapping[str, Any]) -> None:
    """Give an optimizer the state that was read.

    Args:
        module: the parameters under their names.
        optimizer: of these parameters.
        loaded: the filled buffers from ``places``.

    Raises:
        InputError: if it is of another kind of optimizer.
    """
    names = _names(module)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, Any] = {}
    for index, parameter in enumerate(parameters):
        name = _saved(_known(names, parameter), loaded)
        if entries := _below(loaded, f"state.{name}."):
            state[index] = _nested(entries)
    groups = optimizer.state_dict()["param_groups"]
    for group in groups:
        for index in group["params"][:1]:
            name = _saved(_known(names, parameters[index]), loaded)
            settings = _below(loaded, f"param_groups.{name}.")
            lacking, more = (
                group.keys() - settings.keys() - {"params"},
                settings.keys() - group.keys(),
            )
            # settings may be added or dropped between versions of torch; both at once means another
            # optimizer
            if lacking and more:
                raise InputError(
                    "the checkpoint is of another kind of optimizer than this "
                    f"{type(optimizer).__name__}: it has {min(more)!r} and no {min(lacking)!r}; "
                    "make the kind of optimizer that was saved"
                )
            group.update(settings)
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _names(module: nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter; tied parameters have several."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def _known(names: Mapping[int, list[str]], parameter: Tensor) -> list[str]:
    if id(parameter) not in names:
        raise InputError(
            f"the optimizer has a parameter of shape {tuple(parameter.shape)} that is not in this "
            "process: make the optimizer from pipeline.parameters()"
        )
    return names[id(parameter)]


def _saved(names: list[str], kept: Mapping[str, Any]) -> str:
    """Return the name under which a parameter was saved."""
    for name in names:
        if any(key.startswith(f"param_groups.{name}.") for key in kept):
            return name
    raise InputError(
        f"the checkpoint has nothing of an optimizer for parameter {names[0]!r}: give save(path, "
        "optimizer) one of all parameters, or load(path) without"
    )


def _empty(stored: TensorStorageMetadata, device: torch.device) -> Tensor:
    return torch.empty(stored.size, dtype=stored.properties.dtype, device=device)


def _below(table: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {
        key.removeprefix(prefix): value for key, value in table.items() if key.startswith(prefix)
    }


def _leaves(state: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of a parameter's state by key; some optimizers nest them."""
    # a dot separates nested keys, as torch's own checkpoints do
    for key, value in state.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", leaf) for inner, leaf in _leaves(value))
        else:
            yield str(key), value


def _nested(entries: Mapping[str, Any]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for key, value in entries.items():
        *path, leaf = key.split(".")
        table = root
        for step in path:
            table = table.setdefault(step, {})
        table[leaf] = value
    return root
