"""Loading a checkpoint into a model on meta, each tensor straight to its device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from placer import devices as hardware
from placer.capture.argument_checks import require_module
from placer.capture.layers import named_state, tensor_bytes
from placer.checkpoints.bitsandbytes_weights import joined
from placer.checkpoints.files import read_checkpoint
from placer.checkpoints.meta_parameters import is_active
from placer.checkpoints.misfits import Misfits
from placer.checkpoints.state_names import StateNames
from placer.checkpoints.state_slots import StateSlots, users
from placer.checkpoints.transformers_models import Derived, dtypes, tie
from placer.devices import DeviceLike
from placer.errors import InputError, PlacementError
from placer.executor.dataflow import DataFlow
from placer.executor.stage_errors import clear_frames
from placer.executor.state.assignment import Assignment
from placer.executor.state.state_moves import compact_rnn_weights, move_state
from placer.profiler.progress import Shown, progress_bar
from placer.schema import Placement
from placer.utils.dtypes import as_dtype
from placer.utils.units import bytes_text

_CONVERTED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that ``dtype`` changes. Smaller ones hold quantised weights, which need their
scales."""


def load(
    model: nn.Module,
    placement: Placement | Mapping[str, Any],
    path: str | PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    devices: Sequence[DeviceLike] | int | None = None,
    strict: bool = True,
    progress: Shown = True,
    disk_folder: str | PathLike[str] | None = None,
) -> nn.Module:
    """Load a checkpoint into a model on meta, each tensor straight to its device of a placement.

    ``DataFlow(model).update_flow(placement)`` then finds all weights in place; those that rest on
    the host move into pinned memory there, with at most 1 GiB in addition at a time. The files are
    mapped into memory and read tensor by tensor: apart from weights that are placed on the host,
    the host needs memory for the largest tensor. Weights that rest on the disk stay in the files of
    the checkpoint; those that change, as by ``dtype``, are written to files of their own.

    The model gets new tensors, so make optimizers afterwards. Its buffers that the checkpoint does
    not hold keep their values and move to their devices. Build the model inside
    ``placer.on_meta()``, which leaves these values in place.

    Args:
        model: any module; its parameters may be on meta, all or some of them.
        placement: the devices of its layers.
        path: a file of safetensors (``.safetensors``) or torch (``.bin``, ``.pt``, ``.pth``), an
            index of shards (``*.index.json``), or a folder with one of them.
        dtype: of floating-point parameters and saved buffers; None (default) for the checkpoint's.
            Integers and 8-bit floating-point numbers never change.
        devices: as ``device_ids`` of ``DataFlow``; None (default) for all available devices.
        strict: refuse keys that the model does not have, and tensors that the checkpoint does not
            have (default). False ignores such keys, and tensors that have values.
        progress: show bytes on stderr if that is a terminal; ``"always"`` shows them everywhere.
        disk_folder: for files of weights that rest on the disk, as for ``DataFlow``.

    Returns:
        The model.

    Raises:
        InputError: the checkpoint cannot be read or does not fit the model, or a buffer that it
            does not hold is on meta. The model is then unchanged.
        PlacementError: the placement does not fit the model, or a device lacks memory. The model is
            then unchanged.
        MissingExtraError: safetensors is not installed.
    """
    require_module(model)
    kind = as_dtype(dtype)
    if is_active():
        raise InputError(
            "load was called inside placer.on_meta(), which would put the weights on meta; call it "
            "after the block"
        )
    assignment = DataFlow(model, devices).assignment_of(placement)
    # parameters made in inference mode could not be trained later
    with torch.inference_mode(False), torch.no_grad(), StateSlots(model) as before:
        tie(model)
        derived = _assign(model, path, strict)
        loaded = {
            name: tensor for name, tensor in named_state(model).items() if not before.holds(tensor)
        }
        _place(model, loaded, derived, assignment, kind, progress, disk_folder)
        move_state(model, assignment.of_state)
        compact_rnn_weights(model)
    return model


def map_weights(model: nn.Module, path: str | PathLike[str]) -> None:
    """Give a model on ``meta`` the tensors of a checkpoint, mapped from its files.

    They take no memory until they are used. Tensors that are computed from several ones stay on
    ``meta``.

    Args:
        model: any module.
        path: as for ``load``.

    Raises:
        InputError: as for ``load``. The model is then unchanged.
    """
    with torch.inference_mode(False), torch.no_grad(), StateSlots(model):
        tie(model)
        _assign(model, path, strict=True)


def _assign(model: nn.Module, path: str | PathLike[str], strict: bool) -> dict[int, Derived]:
    """Give a model the tensors of a checkpoint, whose memory is mapped from its files.

    Returns:
        The tensors that are computed from several ones, by the ``id`` of a tensor on meta that the
        model holds instead.
    """
    names = StateNames(model)
    _refuse_lost(names.unsaved)
    with hardware.unobserved():
        values = joined(model, names.renamed(read_checkpoint(path)))
        misfits = Misfits(model, StateNames(model), Path(path), strict)
        # the model's own methods load, since modules may adapt keys of earlier versions
        found = misfits.without_mismatches(values)
        try:
            result = model.load_state_dict(found, strict=False, assign=True)
        except RuntimeError as error:
            raise misfits.refused_by_model(error) from error
    misfits.refuse(result.missing_keys, result.unexpected_keys, values)
    return misfits.derived


def _refuse_lost(unsaved: Mapping[str, Tensor]) -> None:
    if lost := [name for name, buffer in unsaved.items() if buffer.is_meta]:
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        raise InputError(
            f"buffer {lost[0]!r} is on meta{more}, and checkpoints do not hold it "
            "(persistent=False): build the model inside `with placer.on_meta():` instead of "
            "`torch.device('meta')`, so that its own code computes the buffer"
        )


def _place(
    model: nn.Module,
    loaded: dict[str, Tensor],
    derived: dict[int, Derived],
    assignment: Assignment,
    dtype: torch.dtype | None,
    progress: Shown,
    disk_folder: str | PathLike[str] | None,
) -> None:
    """Replace loaded tensors by copies on their devices, one after the other.

    Args:
        model: whose modules hold them.
        loaded: by name; emptied, so that the files are closed as soon as possible.
        derived: the tensors to be computed, by the ``id`` of a loaded one.
        assignment: the devices.
        dtype: of floating-point tensors; None leaves them.
        progress: whether to show it.
        disk_folder: for weights that rest on the disk and cannot stay in the checkpoint's files.
    """
    files = hardware.MappedFiles()
    holders, dtype_of = users(model), dtypes(model, dtype)
    total = sum(map(tensor_bytes, loaded.values()))
    with progress_bar(progress, total, "bytes") as bar:
        for name in list(loaded):
            tensor = loaded.pop(name)
            bar(name, tensor_bytes(tensor))
            source = derived.pop(id(tensor), None)
            value = tensor if source is None else source.read()
            value = _converted(value, dtype_of(name))
            if not assignment.rests_on_disk(name):
                placed = _placed(name, value, assignment.of_state(name))
            elif files.of(value) is None:
                placed = hardware.stored(value, hardware.disk_folder(disk_folder))
            else:
                placed = value
            if isinstance(tensor, nn.Parameter) and not isinstance(placed, nn.Parameter):
                placed = nn.Parameter(placed, requires_grad=tensor.requires_grad)
            for module, attribute in holders[id(tensor)]:
                setattr(module, attribute, placed)


def _converted(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a tensor in a dtype, if it may be converted; the tensor itself if it has that."""
    if dtype is not None and hardware.is_plain(value) and value.dtype in _CONVERTED:
        return value.to(dtype)
    return value


def _placed(name: str, value: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a tensor on its device."""
    try:
        return hardware.copy(value, device)
    except torch.OutOfMemoryError as error:
        clear_frames(error)
        raise PlacementError(
            f"no room on {device} for {name!r} ({bytes_text(tensor_bytes(value))}); the model is "
            "unchanged. Place fewer layers there, or give the placement a lower memory limit for it"
        ) from error
