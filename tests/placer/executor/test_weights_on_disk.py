"""Models whose parameters rest on the disk compute what the unsplit model does."""

from __future__ import annotations

import copy
import gc
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import resting_models
import torch
from resting_blocks import BLOCKS, make, placed, placement
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import placer
from placer import DataFlow, devices
from placer.devices import mapped_files
from placer.errors import InputError, PlacementError, PlacerError
from placer.testing import logical_devices

if not Path("/proc/self/maps").exists():
    pytest.skip("the system does not list mapped files", allow_module_level=True)


@pytest.fixture(autouse=True)
def two_devices() -> Iterator[None]:
    with logical_devices(2):
        yield


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight takes several staging buffers."""
    monkeypatch.setattr(mapped_files, "STAGING_BYTES", 192)


def file_of(parameter: Tensor) -> str:
    """The path of the file that a parameter is mapped from; empty if it has ordinary memory."""
    file = devices.MappedFiles().of(parameter)
    return "" if file is None else file.path


@pytest.mark.covering
@pytest.mark.parametrize("first", [BLOCKS, 4])
@pytest.mark.parametrize(
    "disk, host", [("0", ""), ("13", "24"), ("0246", ""), ("0123456", ""), ("36", "01245")]
)
def test_a_call_gives_the_unsplit_models_result(
    disk: str, host: str, first: int, tmp_path: Path
) -> None:
    flow, model, reference = placed(host, disk, first, tmp_path)
    x = torch.randn(4, 8)
    for _ in range(3):
        torch.testing.assert_close(flow(x).cpu(), reference(x))
    for name, parameter in model.named_parameters():
        layer = name.split(".")[0]
        assert file_of(parameter).startswith(f"{tmp_path}/") == (layer in disk)
        assert (devices.location(parameter) == devices.HOST) == (layer in disk + host)
    assert not list(tmp_path.iterdir()), "a file without a name goes with its last tensor"


@pytest.mark.parametrize("first", [BLOCKS, 4])
def test_modules_run_through_hooks_on_their_copies(first: int, tmp_path: Path) -> None:
    flow, model, reference = placed("4", "1256", first, tmp_path)
    x = torch.randn(4, 8)
    before = [*model.parameters()]
    with torch.no_grad(), flow.applied() as applied:
        found = applied[:3](applied[3:6](x))
        torch.testing.assert_close(found.cpu(), reference[:3](reference[3:6](x)))
    assert all(map(lambda one, other: one is other, model.parameters(), before))


def test_micro_batches_give_the_result_of_the_batch(tmp_path: Path) -> None:
    flow, _, reference = placed("2", "01356", 3, tmp_path)
    x = torch.randn(6, 8)
    torch.testing.assert_close(flow(x, chunks=3).cpu(), reference(x))


def test_new_weights_are_read_in_the_next_call(tmp_path: Path) -> None:
    flow, model, reference = placed(disk="0246", folder=tmp_path)
    x = torch.randn(4, 8)
    flow(x)
    with torch.no_grad():
        for each in (model, reference):
            each[2].up.weight.mul_(3)
            each[4].up.weight.data.mul_(2)
    torch.testing.assert_close(flow(x).cpu(), reference(x))
    state = {name: tensor * 0.5 for name, tensor in reference.state_dict().items()}
    reference.load_state_dict(state)
    for assign in (False, True):
        model.load_state_dict({name: one.clone() for name, one in state.items()}, assign=assign)
        torch.testing.assert_close(flow(x).cpu(), reference(x))
    assert file_of(model[2].up.weight), "what replaces a parameter is written to a file, too"


def test_undo_gives_the_parameters_memory_of_their_own(tmp_path: Path) -> None:
    flow, model, reference = placed("6", "024", 3, tmp_path)
    flow(torch.randn(4, 8))
    flow.undo()
    assert list(model.state_dict()) == list(reference.state_dict())
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(one, other) and not file_of(one)
        assert devices.location(one) == devices.HOST
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text(), "no file is left"


def test_another_placement_moves_parameters_between_all_tiers(tmp_path: Path) -> None:
    flow, model, reference = placed("1", "0246", 3, tmp_path)
    flow.update_flow(placement("02", "351", 5))
    x = torch.randn(4, 8)
    torch.testing.assert_close(flow(x).cpu(), reference(x))
    on_disk = {name.split(".")[0] for name, one in model.named_parameters() if file_of(one)}
    assert on_disk == set("351")
    assert devices.location(model[4].up.weight) == torch.device("cpu", 0)


def test_the_state_is_saved_and_copied_as_from_memory(tmp_path: Path) -> None:
    flow, model, reference = placed("1", "0246", folder=tmp_path)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    save_file(model.state_dict(), tmp_path / "state.safetensors")
    for found in (torch.load(tmp_path / "state.pt"), load_file(tmp_path / "state.safetensors")):
        assert all(torch.equal(one, found[name]) for name, one in reference.state_dict().items())
    x = torch.randn(4, 8)
    copied = copy.deepcopy(flow)
    torch.testing.assert_close(copied(x).cpu(), reference(x))
    assert file_of(copied.module[2].up.weight)


def test_another_placement_frees_the_slots_and_their_thread_at_once(tmp_path: Path) -> None:
    others = set(threading.enumerate())
    flow, _, _ = placed(disk="0123", folder=tmp_path)
    with torch.no_grad(), flow.applied() as applied:
        applied[1](applied[0](torch.randn(1, 8)))
    flow(torch.randn(1, 8))
    resting = flow.placed.hooks.resting
    assert resting is not None
    memory = weakref.ref(resting.slots[0].memory[0])
    (thread,) = set(threading.enumerate()) - others
    del resting
    gc.disable()
    try:
        flow.update_flow(placement(disk="45"))
        assert memory() is None
        thread.join(10)
        assert not thread.is_alive()
    finally:
        gc.enable()


def saved(folder: Path) -> Path:
    """A checkpoint of the model."""
    path = folder / "model.safetensors"
    save_file(make().state_dict(), path)
    return path


def loaded(path: Path, folder: Path, **options: object) -> tuple[DataFlow, nn.Module]:
    """A flow of the model that ``placer.load`` read from a checkpoint."""
    with placer.on_meta():
        model = make()
    where = placement("1", "0246", 5)
    placer.load(model, where, path, disk_folder=folder, progress=False, **options)  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        assert (file_of(parameter) != "") == (name[0] in "0246"), "memory is not taken meanwhile"
    flow = DataFlow(model, inference_only=True, disk_folder=folder)
    flow.update_flow(where)
    return flow, model


def test_weights_of_a_checkpoint_stay_in_its_file(tmp_path: Path) -> None:
    path, folder = saved(tmp_path), tmp_path / "unused"
    flow, model = loaded(path, folder)
    x = torch.randn(4, 8)
    torch.testing.assert_close(flow(x).cpu(), make()(x))
    for name, parameter in model.named_parameters():
        assert file_of(parameter) == (str(path) if name[0] in "0246" else "")
    assert not folder.exists()
    save_file(model.state_dict(), tmp_path / "again.safetensors")
    again = load_file(tmp_path / "again.safetensors")
    assert all(torch.equal(one, again[name]) for name, one in make().state_dict().items())
    torch.save(model[2].state_dict(), tmp_path / "block.pt")
    for name, one in torch.load(tmp_path / "block.pt").items():
        assert torch.equal(one, make()[2].state_dict()[name])
        assert one.untyped_storage().nbytes() == one.nbytes, "not the whole file"
    flow.undo()
    assert file_of(model[2].up.weight) == str(path), "it was there before"


def test_converted_weights_of_a_checkpoint_are_written(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    flow, model = loaded(saved(tmp_path), folder, dtype=torch.float64)
    x = torch.randn(4, 8, dtype=torch.float64)
    torch.testing.assert_close(flow(x).cpu(), make().double()(x))
    assert file_of(model[2].up.weight).startswith(str(folder))


@pytest.mark.parametrize("is_applied", [False, True])
def test_a_truncated_file_ends_in_an_error_that_names_it(is_applied: bool, tmp_path: Path) -> None:
    path = saved(tmp_path)
    flow, _ = loaded(path, tmp_path)
    x = torch.randn(4, 8)
    flow(x)
    content = path.read_bytes()
    os.truncate(path, 1000)
    for _ in range(2):
        with pytest.raises(PlacerError, match=f"{path} has 1000 bytes"), torch.no_grad():
            if is_applied:
                with flow.applied() as applied:
                    applied[0](x)
            else:
                flow(x)
    with path.open("r+b") as file:
        file.write(content)
    torch.testing.assert_close(flow(x).cpu(), make()(x))


def test_a_full_disk_leaves_the_model_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make()
    flow = DataFlow(model, inference_only=True, disk_folder=tmp_path)
    count = 0

    def fails(file: Path, size_bytes: int) -> Tensor:
        nonlocal count
        count += 1
        if count == 3:
            raise OSError(28, "No space left on device")
        return torch.zeros(size_bytes, dtype=torch.uint8).copy_(
            torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)
        )

    monkeypatch.setattr(mapped_files, "mapped_bytes", fails)
    with pytest.raises(PlacementError, match=f"cannot be written to {tmp_path}.*No space left"):
        flow.update_flow(placement(disk="024"))
    for one, other in zip(model.parameters(), make().parameters(), strict=True):
        assert torch.equal(one, other) and devices.location(one) == devices.HOST
    assert flow.assignment is None


def test_what_does_not_support_weights_on_disk_says_so(tmp_path: Path) -> None:
    flow, _, _ = placed(disk="0123", folder=tmp_path)
    with pytest.raises(InputError, match="train_step does not support parameters that rest"):
        flow.train_step(nn.MSELoss())
    flow = DataFlow(make(), disk_folder=tmp_path)
    flow.update_flow(placement(disk="0123"))
    with pytest.raises(InputError, match=r"rest on the host, which supports no gradients"):
        flow(torch.randn(4, 8))


@pytest.mark.parametrize("first", [resting_models.LAYERS, 3])
def test_texts_are_the_unsplit_models_and_tokens_are_not_recorded(
    first: int, tmp_path: Path
) -> None:
    model, reference = resting_models.pair()
    names = resting_models.blocks
    flow = resting_models.placed(
        model, ["cpu:0", "cpu:1"], names([0, 4]), first, names([1, 2, 5]), tmp_path
    )
    ids = torch.arange(3, 17).view(2, 7)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = reference.generate(ids, **options)
    with flow.applied() as applied:
        assert applied.generate(ids, **options).tolist() == expected.tolist()
    report = flow.generation_report
    assert report.recorded == 0
    assert report.not_recorded_because.startswith("27 parameters rest on the disk")
    found = list(flow.generate_many([ids[:1], ids[1:]], in_flight=2, **options))
    for number, text in enumerate(found):
        own = reference.generate(ids[number : number + 1], **options)
        assert text.tolist() == own.tolist()
