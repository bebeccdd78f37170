"""Checkpoints in several files, and placements by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from placer import Placement


def placed(layer_devices: Mapping[str, str], **more: Any) -> Placement:
    """Return a placement of a model's layers; further fields may be given."""
    fields = {"status": "feasible", "objective": "throughput", **more}
    return Placement.model_validate(fields | {"layer_devices": dict(layer_devices)})


def save_shards(
    state: Mapping[str, Tensor], folder: Path, suffix: str, leave: Sequence[str] = ()
) -> Path:
    """Save every third tensor in the same file, and return the index.

    Args:
        state: the tensors by name.
        folder: where to save.
        suffix: ``.safetensors`` or ``.bin``.
        leave: names that are not saved.
    """
    names = [name for name in state if name not in leave]
    files = [f"model-0000{number}-of-00003{suffix}" for number in (1, 2, 3)]
    for start, file in enumerate(files):
        shard = {name: state[name].clone() for name in names[start::3]}
        save_file(shard, folder / file) if suffix == ".safetensors" else torch.save(
            shard, folder / file
        )
    weight_map = {name: files[number % 3] for number, name in enumerate(names)}
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    index = folder / f"{stem}{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index
