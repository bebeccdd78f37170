"""Files that cannot be read as checkpoints are refused with the remedy."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_folders import save_shards
from safetensors.torch import save_file

from placer import InputError
from placer.checkpoints.files import read_checkpoint

STATE = {"a": torch.ones(2), "b": torch.zeros(3), "c": torch.ones(1)}


def of_the_old_format(folder: Path) -> Path:
    torch.save(STATE, folder / "old.pt", _use_new_zipfile_serialization=False)
    return folder / "old.pt"


def with_objects(folder: Path) -> Path:
    torch.save({"a": torch.ones(2), "b": Fraction(1, 2)}, folder / "model.pt")
    return folder / "model.pt"


def of_something_else(folder: Path) -> Path:
    torch.save({"epoch": 3, "loss": 0.5}, folder / "model.pt")
    return folder


def that_is_a_pickle(folder: Path) -> Path:
    (folder / "model.pt").write_bytes(pickle.dumps([1]))
    return folder


def without_a_header(folder: Path) -> Path:
    (folder / "model.safetensors").write_bytes(b"no header")
    return folder


def of_an_unknown_format(folder: Path) -> Path:
    (folder / "model.gguf").write_bytes(b"GGUF")
    return folder / "model.gguf"


def with_several_models(folder: Path) -> Path:
    for name in ("unet", "vae"):
        save_file(STATE, folder / f"{name}.safetensors")
    return folder


def without_a_shard(folder: Path) -> Path:
    save_shards(STATE, folder, ".safetensors")
    (folder / "model-00002-of-00003.safetensors").unlink()
    return folder


def with_a_short_shard(folder: Path) -> Path:
    save_shards(STATE, folder, ".safetensors")
    save_file({"z": torch.ones(1)}, folder / "model-00002-of-00003.safetensors")
    return folder


def with_a_damaged_index(folder: Path) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps(["a"]))
    return folder


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (of_the_old_format, r"is not a zip file.* and save it again with torch\.save"),
        (with_objects, r"objects of fractions\.Fraction.*add_safe_globals"),
        (of_something_else, r"holds a dict of epoch, loss, not the weights.*state_dict\(\)"),
        (that_is_a_pickle, r"is not a zip file"),
        (without_a_header, r"model\.safetensors cannot be read as safetensors"),
        (of_an_unknown_format, r"model\.gguf is not a checkpoint of a known format; give a"),
        (with_several_models, r"2 checkpoints \(unet\.safetensors, vae\.safetensors\); give the"),
        (without_a_shard, r"lacks model-00002-of-00003\.safetensors, which .*download all shards"),
        (with_a_short_shard, r"model-00002-of-00003\.safetensors lacks b, which .* places there"),
        (with_a_damaged_index, r"index\.json is not an index of shards"),
        (lambda folder: folder, r"has no checkpoint; give a folder with \.safetensors"),
        (lambda folder: folder / "none", r"none does not exist; give a checkpoint's file"),
        (lambda folder: 3, r"path is an int; give the path"),
    ],
)
def test_what_cannot_be_read_is_refused(
    path: Callable[[Path], Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        read_checkpoint(path(tmp_path))


def test_a_file_of_safetensors_is_preferred_to_one_of_torch(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    save_file(STATE, tmp_path / "model.safetensors")
    assert torch.equal(read_checkpoint(tmp_path)["a"], torch.ones(2))


def test_the_usual_name_is_preferred_to_others(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "model.safetensors")
    save_file({"x": torch.ones(1)}, tmp_path / "model.fp16.safetensors")
    save_file({"x": torch.ones(1)}, tmp_path / "adapter.safetensors")
    assert read_checkpoint(tmp_path).keys() == STATE.keys()
