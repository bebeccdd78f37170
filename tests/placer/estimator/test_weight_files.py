from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from placer.errors import InputError
from placer.estimator.weight_files import block_of, tensor_sizes, weights_profile

safetensors = pytest.importorskip("safetensors.torch")


def save(file: Path, **shapes: tuple[int, ...]) -> None:
    named = {name.replace("__", "."): torch.zeros(shape) for name, shape in shapes.items()}
    safetensors.save_file(named, file)


def test_the_header_gives_the_bytes_that_safetensors_wrote(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    tensors = {
        "a": torch.zeros(3, 5, dtype=torch.bfloat16),
        "b": torch.zeros(7),
        "c": torch.zeros(2, dtype=torch.int8),
    }
    safetensors.save_file(tensors, file, metadata={"format": "pt"})
    assert tensor_sizes(file) == {"a": 30, "b": 28, "c": 2}


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("model.layers.3.mlp.up.weight", "model.layers.3"),
        ("model.norm.weight", "model.norm"),
        ("scale", "scale"),
        ("encoder.block.1.layer.0.k.weight", "encoder.block.1"),
    ],
)
def test_tensors_of_a_numbered_block_are_one_layer(name: str, block: str) -> None:
    assert block_of(name) == block


def test_shards_are_joined_with_blocks_in_order(tmp_path: Path) -> None:
    save(tmp_path / "1.safetensors", head__weight=(4,), m__layers__10__w=(2,), m__embed__w=(8,))
    save(tmp_path / "2.safetensors", m__layers__2__w=(1,), m__layers__10__b=(1,))
    found = weights_profile(tmp_path)
    sizes = [(layer.name, layer.param_bytes) for layer in found.layers]
    assert sizes == [("m.embed", 32), ("m.layers.2", 4), ("m.layers.10", 12), ("head", 16)]


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save(tmp_path / "1.safetensors", a=(1,))
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"lacks 2\.safetensors"):
        weights_profile(tmp_path)


def with_header(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04 a zip file of torch.save",
        with_header(b"not JSON"),
        with_header(b"[1]"),
        with_header(b'{"a": {"dtype": "F32"}}'),
        with_header(b'{"a": {"data_offsets": [8, 0]}}'),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(InputError, match="is not a safetensors file"):
        tensor_sizes(file)
