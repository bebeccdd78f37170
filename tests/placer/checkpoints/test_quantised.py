"""Checkpoints of quantised weights keep them quantised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_folders import placed
from quantised_kinds import QUANTISED, WIDTH
from safetensors.torch import save_file
from torch import Tensor, nn

import placer
from placer import DataFlow, InputError, devices
from placer.testing import logical_devices

SPLIT = {"0": "cpu:0", "1": "cpu:1"}
TORCHAO = [name for name in QUANTISED if name.startswith("torchao")]


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).eval()


def in_torchs_format(model: nn.Module, folder: Path) -> None:
    torch.save(model.state_dict(), folder / "model.pt")


def in_safetensors(model: nn.Module, folder: Path) -> None:
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    tensors, metadata = flatten_tensor_state_dict(model.state_dict())
    save_file(tensors, folder / "model.safetensors", metadata)


@pytest.mark.covering
@pytest.mark.parametrize(
    ("name", "save"),
    [
        *((name, in_torchs_format) for name in TORCHAO),
        ("torchao int8 weights", in_safetensors),
        ("torchao float8 weights", in_safetensors),
    ],
)
def test_weights_of_torchao_are_loaded_as_they_were_saved(
    name: str, save: Callable[[nn.Module, Path], None], tmp_path: Path
) -> None:
    kind = QUANTISED[name]
    saved = nn.Sequential(kind.make(), kind.make()).eval()
    save(saved, tmp_path)
    batch = torch.randn(3, WIDTH)
    with placer.on_meta():
        model: Any = two_layers()
    with logical_devices(2):
        placer.load(model, placed(SPLIT), tmp_path, progress=False)
        assert type(model[1].weight) is type(saved[1].weight)
        stored = kind.stored(model[1])
        assert {str(devices.location(part)) for part in stored} == {"cpu:1"}
        flow = DataFlow(model, inference_only=True)
        flow.update_flow(placed(SPLIT))
        with torch.no_grad():
            result = flow(batch.to("cpu:0")).cpu()
    assert torch.equal(result, saved(batch))


def four_bits() -> nn.Sequential:
    import bitsandbytes

    options = {"compute_dtype": torch.float32, "quant_type": "nf4", "compress_statistics": True}
    return nn.Sequential(*(bitsandbytes.nn.Linear4bit(WIDTH, WIDTH, **options) for _ in range(2)))


def eight_bits() -> nn.Sequential:
    import bitsandbytes

    kind = bitsandbytes.nn.Linear8bitLt
    return nn.Sequential(*(kind(WIDTH, WIDTH, has_fp16_weights=False) for _ in range(2)))


@pytest.mark.parametrize("make", [four_bits, eight_bits])
def test_weights_of_bitsandbytes_are_loaded_as_they_were_saved(
    make: Callable[[], nn.Sequential], tmp_path: Path
) -> None:
    saved = make().to("cpu").eval()  # the move quantises
    save_file(saved.state_dict(), tmp_path / "model.safetensors")
    batch = torch.randn(3, WIDTH)
    with placer.on_meta():
        model = make().eval()
    with logical_devices(2):
        placer.load(model, placed(SPLIT), tmp_path, progress=False)
        parts = devices.parts(model[1].weight)
        assert {str(devices.location(part)) for part in parts} == {"cpu:1"}
        before = [part.data_ptr() for part in parts]
        flow = DataFlow(model, inference_only=True)
        flow.update_flow(placed(SPLIT))
        assert [part.data_ptr() for part in devices.parts(model[1].weight)] == before
        with torch.no_grad():
            result = flow(batch.to("cpu:0")).cpu()
    with torch.no_grad():
        assert torch.equal(result, saved(batch))


def test_weights_of_bitsandbytes_for_other_layers_are_refused_with_the_remedy(
    tmp_path: Path,
) -> None:
    save_file(four_bits().to("cpu").state_dict(), tmp_path / "model.safetensors")
    with placer.on_meta():
        model = two_layers()
    with pytest.raises(InputError, match=r"\nBuild.* layers of bitsandbytes that were saved"):
        placer.load(model, placed(SPLIT), tmp_path, progress=False)


class Packed(nn.Module):
    """A linear layer whose weight is four-bit integers, eight of them in an int32, as in GPTQ."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.zeros(width // 8, width, dtype=torch.int32))
        self.register_buffer("scales", torch.zeros(1, width, dtype=torch.float16))
        self.register_buffer("g_idx", torch.zeros(width, dtype=torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        qweight: Any = self.qweight
        shifts = torch.arange(0, 32, 4, device=x.device).view(1, 8, 1)
        weight = ((qweight.unsqueeze(1) >> shifts) & 15).flatten(0, 1) - 8
        scales: Any = self.scales
        result: Tensor = x @ (weight * scales.float())
        return result


def test_packed_integers_are_loaded_unchanged(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved = nn.Sequential(Packed(), Packed())
    for name, buffer in saved.named_buffers():
        if "scales" not in name:
            buffer.copy_(torch.randint(-(2**31), 2**31 - 1, buffer.shape, dtype=torch.int32))
        else:
            buffer.copy_(torch.rand(buffer.shape))
    save_file(saved.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(Packed(), Packed())
    batch = torch.randn(3, 16)
    with logical_devices(2):
        placer.load(model, placed(SPLIT), tmp_path, dtype=torch.float32, progress=False)
        flow = DataFlow(model)
        flow.update_flow(placed(SPLIT))
        result = flow(batch.to("cpu:0")).cpu()
    assert torch.equal(result, saved(batch))
    assert model.get_buffer("0.scales").dtype == torch.float32


def test_integers_for_a_floating_point_weight_are_refused(tmp_path: Path) -> None:
    state = {name: value.to(torch.int8) for name, value in two_layers().state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    with placer.on_meta():
        model = two_layers()
    with pytest.raises(InputError, match="quantised weights need the modules that read them"):
        placer.load(model, placed(SPLIT), tmp_path, progress=False)
