"""Tensors whose memory is mapped from files: where they are, what they cost, how they are read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from placer.devices import FileReader, Lane, MappedFiles, disk_folder, mapped_files, stored
from placer.errors import InputError, PlacementError

if not Path("/proc/self/maps").exists():
    pytest.skip("the system does not list mapped files", allow_module_level=True)

TENSORS = [
    torch.randn(3, 5),
    torch.randn(4, 6).t(),
    torch.randn(9, dtype=torch.bfloat16),
    torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    torch.randn(6, 4)[:, ::2],
    torch.empty(0, 3),
    torch.tensor(2.0),
]


def read(path: Path, name: str) -> Tensor:
    """A tensor of a file of safetensors."""
    with safe_open(str(path), framework="pt", device="cpu") as opened:
        found: Tensor = opened.get_tensor(name)
        return found


def copied(tensor: Tensor) -> Tensor:
    """A copy through staging buffers."""
    target = torch.empty_like(tensor)
    file = MappedFiles().of(tensor)
    assert file is not None
    FileReader().copy([(tensor, target, file)], Lane(torch.device("cpu")))
    return target


@pytest.mark.parametrize("tensor", TENSORS)
def test_a_stored_tensor_is_equal_and_mapped_from_a_file_without_a_name(
    tensor: Tensor, tmp_path: Path
) -> None:
    found = stored(tensor, tmp_path)
    assert torch.equal(found, tensor) and found.dtype == tensor.dtype
    file = MappedFiles().of(found)
    assert (file is None) == (not tensor.numel())
    assert file is None or file.path.startswith(f"{tmp_path}/")
    assert not list(tmp_path.iterdir())


def test_memory_without_a_file_is_no_mapped_file() -> None:
    files = MappedFiles()
    for tensor in (
        torch.ones(5),
        torch.ones(1 << 20).share_memory_(),
        torch.ones(2, device="meta"),
    ):
        assert files.of(tensor) is None


def test_tensors_of_a_checkpoint_are_known_by_their_file(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"one": torch.ones(3, 7), "two": torch.ones(5)}, path)
    tensors = [read(path, name) for name in ("one", "two")]
    files = [*map(MappedFiles().of, tensors)]
    assert all(file is not None and file.path == str(path) for file in files)
    assert max(file.end for file in files if file is not None) == path.stat().st_size
    assert MappedFiles().of(tensors[0][:, ::2]) is None, "it is not one block of the file"


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
def test_copies_go_through_staging_buffers(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_files, "STAGING_BYTES", 64)
    tensor = stored(torch.randint(-128, 127, (size,), dtype=torch.int8), tmp_path)
    assert torch.equal(copied(tensor), tensor)
    tensor = stored(torch.randn(size, 2).t(), tmp_path)
    assert torch.equal(copied(tensor), tensor)


def test_a_staging_buffer_is_overwritten_only_after_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    class Late:
        """A lane whose copies end later: their marks have to be waited for."""

        def __init__(self, device: torch.device) -> None:
            self.count = 0

        def mark(self) -> int:
            self.count += 1
            events.append(f"copy {self.count}")
            return self.count

        def wait(self, mark: int | None) -> None:
            if mark is not None:
                events.append(f"wait {mark}")

    monkeypatch.setattr(mapped_files, "STAGING_BYTES", 64)
    monkeypatch.setattr(mapped_files, "Lane", Late)
    tensors = [stored(torch.arange(40.0), tmp_path), stored(torch.arange(20.0), tmp_path)]
    files = MappedFiles()
    pairs = [(one, torch.empty_like(one), files.of(one)) for one in tensors]
    FileReader().copy(pairs, Late(torch.device("cpu")))  # type: ignore[arg-type]
    expected = ["copy 1", "copy 2"]
    expected += [event for n in (1, 2, 3) for event in (f"wait {n}", f"copy {n + 2}")]
    assert events == expected


def test_changes_in_place_are_copied_and_stay_out_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"one": torch.ones(5000)}, path)
    tensor = read(path, "one")
    tensor[2000:] = 3
    assert torch.equal(copied(tensor), tensor)
    assert torch.equal(read(path, "one"), torch.ones(5000))


@pytest.mark.parametrize("left", [50_000, 3_999_000])
def test_a_truncated_file_is_named(left: int, tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"one": torch.ones(1_000_000)}, path)
    tensor = read(path, "one")
    file = MappedFiles().of(tensor)
    assert file is not None
    os.truncate(path, left)
    with pytest.raises(PlacementError, match=rf"{path} has {left} bytes, .* truncated"):
        FileReader().copy([(tensor, tensor, file)], Lane(torch.device("cpu")))
    # as if it had been truncated after the look at its size
    unseen = file._replace(inode=-1)
    if left == 50_000:
        with pytest.raises(PlacementError, match=rf"{path}, .*, cannot be read any more"):
            FileReader().copy([(tensor, torch.empty(1_000_000), unseen)], Lane(torch.device("cpu")))


def test_a_deleted_file_is_read_on(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"one": torch.arange(5000.0)}, path)
    tensor = read(path, "one")
    path.unlink()
    assert torch.equal(copied(tensor), torch.arange(5000.0))


def test_the_folder_is_the_given_one_or_the_one_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACER_DISK", str(tmp_path / "named"))
    assert disk_folder() == tmp_path / "named" and (tmp_path / "named").is_dir()
    assert disk_folder(tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file, which cannot be created"):
        disk_folder(tmp_path / "file")
    with pytest.raises(InputError, match="disk_folder is 3; give the path"):
        disk_folder(3)


def test_a_disk_that_takes_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match=r"weights of 12 B cannot be written to .*/gone"):
        stored(torch.ones(3), tmp_path / "gone")
