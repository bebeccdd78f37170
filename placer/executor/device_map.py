"""The attribute ``hf_device_map``, which marks placed models for transformers and accelerate.

Without it, ``Trainer`` and ``Accelerator`` move a model to one device, and wrap it in DataParallel
if they see several GPUs. Models loaded with ``device_map=`` have it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from placer.executor.state.assignment import Assignment
from placer.utils.python_objects import attribute_set

Place = int | str | torch.device


@contextmanager
def device_map_set(module: nn.Module, assignment: Assignment) -> Iterator[None]:
    """Give a model its ``hf_device_map`` inside the block.

    Args:
        module: the model.
        assignment: the devices of its modules.
    """
    with ExitStack() as attributes:
        attributes.enter_context(
            attribute_set(module, "hf_device_map", device_map(module, assignment))
        )
        encoder = _encoder(module)
        if encoder is not None and not hasattr(encoder, "_hf_hook"):
            # For a model with such a map, ``generate`` adds a permanent hook of accelerate to an
            # encoder without one. Results reach their devices without it, so a placeholder prevents
            # it.
            attributes.enter_context(
                attribute_set(encoder, "_hf_hook", SimpleNamespace(io_same_device=True))
            )
        yield


def _encoder(module: nn.Module) -> nn.Module | None:
    """Return the encoder of a transformers encoder-decoder; None for other models."""
    if not any(kind.__module__.startswith("transformers.") for kind in type(module).__mro__):
        return None
    find: Any = getattr(module, "get_encoder", None)
    found = find() if find is not None else None
    return found if isinstance(found, nn.Module) and found is not module else None


def device_map(module: nn.Module, assignment: Assignment) -> dict[str, Place]:
    """Return a model's devices in accelerate's format, by path of each module with own tensors.

    ``Trainer`` takes a map with one distinct value for a model that may be replicated, and
    ``Accelerator`` moves a model whose map has one entry. So the first entry, which covers all
    unnamed modules, is a ``torch.device``, and the others are GPU indices or names. There are thus
    always two values, and two entries if the model has a tensor.

    Args:
        module: the model.
        assignment: the devices of its modules.
    """
    found: dict[str, Place] = {"": assignment.of_path("") or assignment.default}
    for path, child in module.named_modules():
        own = [
            name
            for name, _ in (
                *child.named_parameters(recurse=False),
                *child.named_buffers(recurse=False),
            )
        ]
        for name in own[:1] if path else own:
            found[path or name] = _spelled(assignment.place_of(f"{path}.{name}" if path else name))
    return found


def _spelled(device: torch.device) -> Place:
    """Return a device in the map's format.

    A CPU keeps its index, because ``"cpu"`` would mean offloaded weights.
    """
    return device.index if device.type == "cuda" else f"{device.type}:{device.index or 0}"
