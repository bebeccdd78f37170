"""Checkpoints are loaded into models on meta, each tensor straight to its device."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_folders import placed, save_shards
from held_bytes import HeldBytes
from model_list import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

import placer
from placer import DataFlow, InputError, PlacementError, devices
from placer.testing import logical_devices


class Tied(nn.Module):
    """An embedding whose weight is the output's, a buffer that is not saved, and a counter."""

    def __init__(self, width: int = 8, rows: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, width)
        self.block = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
        self.head = nn.Linear(width, rows, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.arange(1.0, width + 1), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.head(self.block(self.embed(ids)) * self.scale)
        return result


SPLIT = {"embed": "cpu:0", "block": "cpu:1", "head": "cpu:0"}


@pytest.fixture
def trained() -> Tied:
    torch.manual_seed(0)
    model = Tied()
    model(torch.randint(0, 12, (9,)))  # so that the statistics differ from a new model's
    return model.eval()


def empty(make: Callable[[], nn.Module] = Tied) -> nn.Module:
    with placer.on_meta():
        return make().eval()


def places(model: nn.Module) -> dict[str, str]:
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: str(devices.location(tensor)) for name, tensor in state.items()}


def addresses(model: nn.Module) -> list[int]:
    return [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]


def load(model: nn.Module, path: Path, split: Mapping[str, str] = SPLIT, **options: Any) -> Any:
    return placer.load(model, placed(split), path, progress=False, **options)


def saved(model: nn.Module, folder: Path, leave: str = "head.weight") -> Path:
    state = {name: value for name, value in model.state_dict().items() if name != leave}
    save_file(state, folder / "model.safetensors")
    return folder / "model.safetensors"


def in_one_file(model: nn.Module, folder: Path) -> Path:
    return saved(model, folder)


def in_a_folder(model: nn.Module, folder: Path) -> Path:
    saved(model, folder)
    torch.save({"state": 1}, folder / "optimizer.pt")
    return folder


def in_shards(model: nn.Module, folder: Path) -> Path:
    save_shards(model.state_dict(), folder, ".safetensors", leave=("head.weight",))
    return folder


def in_torchs_file(model: nn.Module, folder: Path) -> Path:
    torch.save(model.state_dict(), folder / "weights.pth")
    return folder / "weights.pth"


def in_torchs_shards(model: nn.Module, folder: Path) -> Path:
    save_shards(model.state_dict(), folder, ".bin")
    torch.save({"state": 1}, folder / "training_args.bin")
    return folder


def by_its_index(model: nn.Module, folder: Path) -> Path:
    return save_shards(model.state_dict(), folder, ".bin")


def in_a_training_state(model: nn.Module, folder: Path) -> Path:
    optimizer = torch.optim.Adam(model.parameters())
    state = {"epoch": 3, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, folder / "last.pt")
    return folder / "last.pt"


FORMATS = [
    in_one_file,
    in_a_folder,
    in_shards,
    in_torchs_file,
    in_torchs_shards,
    by_its_index,
    in_a_training_state,
]


@pytest.mark.parametrize("save", FORMATS, ids=lambda save: save.__name__)
def test_a_loaded_model_computes_what_the_saved_one_does(
    save: Callable[[nn.Module, Path], Path], trained: Tied, tmp_path: Path
) -> None:
    ids = torch.randint(0, 12, (5,))
    model = load(empty(), save(trained, tmp_path))
    assert torch.equal(model(ids), trained(ids))


def test_update_flow_finds_every_tensor_in_place(trained: Tied, tmp_path: Path) -> None:
    with logical_devices(2):
        model = load(empty(), saved(trained, tmp_path))
        assert places(model) == {
            "embed.weight": "cpu:0",
            "block.0.weight": "cpu:1",
            "block.0.bias": "cpu:1",
            "block.1.weight": "cpu:1",
            "block.1.bias": "cpu:1",
            "block.1.running_mean": "cpu:1",
            "block.1.running_var": "cpu:1",
            "block.1.num_batches_tracked": "cpu:1",
            "scale": "cpu:0",
        }
        before = addresses(model)
        DataFlow(model).update_flow(placed(SPLIT))
        assert addresses(model) == before


def test_replicas_share_the_parameters_as_update_flow_divides_them(
    trained: Tied, tmp_path: Path
) -> None:
    def pair(*names: str) -> list[dict[str, Any]]:
        return [{"device": name, "samples": 2} for name in names]

    replicas = {"cpu:0": pair("cpu:0", "cpu:2"), "cpu:1": pair("cpu:1", "cpu:3")}
    placement = placed(SPLIT, training=True, batch_size=4, replicas=replicas)
    with logical_devices(4):
        model = placer.load(empty(), placement, saved(trained, tmp_path), progress=False)
        owners = places(model)
        DataFlow(model).update_flow(placement)
        assert places(model) == owners
    assert {"cpu:1", "cpu:3"} <= set(owners.values())


def test_parameters_that_were_untied_on_meta_are_tied_again(tmp_path: Path) -> None:
    make = language_model("tied Llama")
    make().save_pretrained(tmp_path)
    model = empty(make)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())  # as accelerate does
    load(model, tmp_path, {"lm_head": "cpu:0"})
    assert model.lm_head.weight is model.get_input_embeddings().weight


@pytest.mark.parametrize("left_out", ["head.weight", "embed.weight"])
def test_a_tied_weight_is_found_under_either_name(
    left_out: str, trained: Tied, tmp_path: Path
) -> None:
    model: Any = load(empty(), saved(trained, tmp_path, left_out))
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.head.weight, trained.head.weight)


def test_a_tie_across_devices_lies_where_update_flow_puts_it(trained: Tied, tmp_path: Path) -> None:
    apart = {"embed": "cpu:1", "block": "cpu:1", "head": "cpu:0"}
    with logical_devices(2):
        moved = copy.deepcopy(trained)
        DataFlow(moved).update_flow(placed(apart))
        assert places(load(empty(), saved(trained, tmp_path), apart)) == places(moved)


def test_keys_with_one_value_do_not_become_a_tie(tmp_path: Path) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))

    state = make().state_dict()
    for name in ("weight", "running_var"):
        state[f"1.{name}"] = state[f"0.{name}"]
    torch.save(state, tmp_path / "model.pt")
    split = {"0": "cpu:0", "1": "cpu:1"}
    with logical_devices(2):
        model = load(empty(make), tmp_path, split)
        found = places(model)
    assert (found["1.weight"], found["1.running_var"]) == ("cpu:1", "cpu:1")


def test_values_that_contradict_a_tie_are_refused(trained: Tied, tmp_path: Path) -> None:
    state = {name: value.clone() for name, value in trained.state_dict().items()}
    state["head.weight"] += 1
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"'embed.weight' and 'head.weight'\nBuild.*without the"):
        load(empty(), tmp_path)


def test_only_floating_point_tensors_change_their_dtype(trained: Tied, tmp_path: Path) -> None:
    model: Any = load(empty(), saved(trained, tmp_path), dtype=torch.bfloat16)
    assert torch.equal(model.embed.weight, trained.embed.weight.bfloat16())
    assert model.block[1].running_var.dtype == torch.bfloat16
    assert model.block[1].num_batches_tracked.dtype == torch.int64
    assert model.scale.dtype == torch.float32


def test_by_default_the_dtype_is_that_of_the_checkpoint(trained: Tied, tmp_path: Path) -> None:
    path = saved(copy.deepcopy(trained).half(), tmp_path)
    model: Any = load(empty(), path)
    assert model.embed.weight.dtype == torch.float16


def test_a_model_with_values_takes_those_of_the_checkpoint(trained: Tied, tmp_path: Path) -> None:
    model = load(Tied().eval(), saved(trained, tmp_path))
    ids = torch.randint(0, 12, (5,))
    assert torch.equal(model(ids), trained(ids))


def test_gradient_flags_stay_as_they_are(trained: Tied, tmp_path: Path) -> None:
    model = empty()
    model.get_parameter("block.0.bias").requires_grad_(False)
    load(model, saved(trained, tmp_path))
    flags = {name: one.requires_grad for name, one in model.named_parameters()}
    assert {name for name, flag in flags.items() if not flag} == {"block.0.bias"}


def test_weights_loaded_in_inference_mode_can_be_trained(trained: Tied, tmp_path: Path) -> None:
    model = empty()
    with torch.inference_mode():
        load(model, saved(trained, tmp_path))
    model(torch.randint(0, 12, (5,))).sum().backward()
    assert model.get_parameter("embed.weight").grad is not None


def test_all_differences_are_listed_and_the_model_is_unchanged(
    trained: Tied, tmp_path: Path
) -> None:
    state = trained.state_dict()
    del state["head.weight"], state["block.1.running_mean"], state["block.1.bias"]
    state |= {"block.0.bias": torch.zeros(3), "block.2.weight": torch.zeros(4, 4)}
    save_file(state, tmp_path / "model.safetensors")
    model = empty()
    before = dict(model.named_parameters()) | dict(model.named_buffers())
    with pytest.raises(InputError) as refused:
        load(model, tmp_path)
    assert str(refused.value).splitlines() == [
        f"{tmp_path} does not fit Tied:",
        "  2 tensors are missing in it: block.1.bias (8,), block.1.running_mean (8,)",
        "  1 key is unknown to the model: block.2.weight (4, 4)",
        "  1 tensor differs: block.0.bias (3,) in the checkpoint, (8,) in the model",
        "Build the model with the configuration that the checkpoint was saved with; the model is "
        "unchanged",
    ]
    after = dict(model.named_parameters()) | dict(model.named_buffers())
    assert all(after[name] is tensor for name, tensor in before.items())


def test_without_strict_unknown_keys_are_ignored(trained: Tied, tmp_path: Path) -> None:
    save_file(
        trained.state_dict() | {"head.weight": trained.head.weight.clone(), "more": torch.ones(1)},
        tmp_path / "a.safetensors",
    )
    model = load(empty(), tmp_path, strict=False)
    assert torch.equal(model.embed.weight, trained.embed.weight)


def test_without_strict_a_missing_tensor_on_meta_is_still_refused(
    trained: Tied, tmp_path: Path
) -> None:
    path = saved(trained, tmp_path, "embed.weight")
    save_file({"block.0.bias": torch.zeros(8)}, path)
    with pytest.raises(InputError, match=r"missing in it: embed.weight \(12, 8\)"):
        load(empty(), path, strict=False)


def test_without_strict_a_missing_tensor_keeps_its_values(trained: Tied, tmp_path: Path) -> None:
    save_file({"embed.weight": torch.ones(12, 8)}, tmp_path / "model.safetensors")
    kept = copy.deepcopy(trained)
    load(kept, tmp_path, strict=False)
    assert torch.equal(kept.embed.weight, torch.ones(12, 8))
    assert torch.equal(kept.block[0].weight, trained.block[0].weight)


def test_a_buffer_on_meta_that_is_not_saved_is_refused_by_name(
    trained: Tied, tmp_path: Path
) -> None:
    with torch.device("meta"):
        model = Tied()
    with pytest.raises(InputError, match=r"buffer 'scale' is on meta.*with placer\.on_meta\(\):"):
        load(model, saved(trained, tmp_path))


def test_an_unsaved_buffer_in_the_checkpoint_is_ignored(trained: Tied, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(dict(trained.state_dict()) | {"scale": torch.zeros(8)}, path)
    assert torch.equal(load(empty(), path).scale, torch.arange(1.0, 9))


@pytest.mark.parametrize("prefix", ["module", "_orig_mod"])
def test_the_prefix_of_a_wrapper_is_ignored(prefix: str, trained: Tied, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save({f"{prefix}.{key}": value for key, value in trained.state_dict().items()}, path)
    assert torch.equal(load(empty(), path).embed.weight, trained.embed.weight)


def test_a_device_without_room_leaves_the_model_unchanged(
    trained: Tied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = devices.copy

    def full(tensor: Tensor, device: torch.device) -> Tensor:
        if str(device) == "cpu:1":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return copied(tensor, device)

    path, model = saved(trained, tmp_path), empty()
    monkeypatch.setattr(devices, "copy", full)
    with pytest.raises(PlacementError, match=r"no room on cpu:1 for 'block\.0\.weight' \(256 B\)"):
        load(model, path)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_layers_of_another_model_are_refused(trained: Tied, tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match="layer 'body' is not a module of Tied"):
        load(empty(), saved(trained, tmp_path), {"body": "cpu:0"})


def test_loading_inside_on_meta_is_refused(trained: Tied, tmp_path: Path) -> None:
    path, model = saved(trained, tmp_path), empty()
    with placer.on_meta(), pytest.raises(InputError, match="call it after the block"):
        load(model, path)


class HostBytes(HeldBytes):
    """Counts the storages of a host whose memory is not mapped from a checkpoint."""

    def _add(self, tensor: Tensor) -> None:
        if not tensor.is_meta and not is_mapped(tensor.untyped_storage().data_ptr()):
            super()._add(tensor)


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, *_, name = line.split()
        start, end = (int(bound, 16) for bound in bounds.split("-"))
        if start <= address < end:
            return name.endswith((".safetensors", ".pt"))
    return False


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_the_host_holds_the_largest_tensor_at_most(suffix: str, tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)), nn.Linear(64, 128))

    path = tmp_path / f"model{suffix}"
    state = make().state_dict()
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    split = {str(number): f"cpu:{number % 2}" for number in range(9)}
    with logical_devices(2):
        model = empty(make)
        with HostBytes([]) as held:
            load(model, path, split, dtype=torch.bfloat16)
    largest = 64 * 128 * 2
    assert largest <= held.peaks["cpu"] <= largest + 1024
    assert held.peaks["cpu:0"] == sum(
        one.nbytes for name, one in model.named_parameters() if int(name[0]) % 2 == 0
    )


def test_the_progress_bar_counts_bytes(
    trained: Tied, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(trained, tmp_path)
    placer.load(empty(), placed(SPLIT), path, progress="always")
    assert "808/808 bytes" in capsys.readouterr().err


LANGUAGE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2": ("GPT2", {"n_embd": 16, "n_layer": 2, "n_head": 2}),
    "tied Llama": (
        "Llama",
        {
            "num_hidden_layers": 2,
            "hidden_size": 16,
            "intermediate_size": 32,
            "tie_word_embeddings": True,
        },
    ),
}


def language_model(name: str) -> Callable[[], Any]:
    library, (kind, options) = transformers(), LANGUAGE_MODELS[name]
    config = getattr(library, f"{kind}Config")(
        vocab_size=60, num_attention_heads=2, bos_token_id=1, eos_token_id=2, **options
    )
    suffix = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    return lambda: getattr(library, kind + suffix)(config)


def halves(model: nn.Module) -> dict[str, str]:
    """Put the first block and what comes before it on one device, the rest on another."""
    leaves = [name for name, child in model.named_modules() if name and not child._modules]
    first = [name for name in leaves if "embed" in name or "wte" in name or ".0." in name]
    return {name: "cpu:0" if name in first else "cpu:1" for name in leaves}


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_a_language_model_equals_the_one_that_transformers_loads(name: str, tmp_path: Path) -> None:
    make = language_model(name)
    torch.manual_seed(1)
    make().save_pretrained(tmp_path, max_shard_size="4KB")
    expected = type(make()).from_pretrained(tmp_path).eval()
    model = empty(make)
    ids = torch.randint(3, 60, (2, 7))
    with logical_devices(2):
        load(model, tmp_path, halves(model))
        flow = DataFlow(model)
        flow.update_flow(placed(halves(model)))
        logits = flow(input_ids=ids.to("cpu:0")).logits.cpu()
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert torch.equal(logits, expected(input_ids=ids).logits)


def test_a_checkpoint_with_a_tensor_for_each_expert_is_converted(tmp_path: Path) -> None:
    library = transformers()
    config = library.MixtralConfig(
        **{"vocab_size": 60, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 3},
    )
    library.MixtralForCausalLM(config).save_pretrained(tmp_path)
    expected = library.MixtralForCausalLM.from_pretrained(tmp_path).state_dict()
    model = empty(lambda: library.MixtralForCausalLM(config))
    load(model, tmp_path, {"lm_head": "cpu:0"})
    assert "model.layers.1.mlp.experts.gate_up_proj" in expected
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_modules_that_transformers_keeps_in_float32_stay_there(tmp_path: Path) -> None:
    library = transformers()
    config = library.T5Config(vocab_size=60, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    library.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    loaded = library.T5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float16)
    model = empty(lambda: library.T5ForConditionalGeneration(config))
    load(model, tmp_path, {"lm_head": "cpu:0"}, dtype=torch.float16)
    expected = {name: value.dtype for name, value in loaded.state_dict().items()}
    assert {name: value.dtype for name, value in model.state_dict().items()} == expected
    assert set(expected.values()) == {torch.float16, torch.float32}


def test_a_base_models_checkpoint_lacks_the_prefix(tmp_path: Path) -> None:
    make = language_model("tied Llama")
    whole = make()
    whole.model.save_pretrained(tmp_path)
    model = load(empty(make), tmp_path, {"lm_head": "cpu:0"})
    assert torch.equal(model.lm_head.weight, whole.lm_head.weight)


def test_a_base_model_takes_the_checkpoint_of_a_model_with_a_head(tmp_path: Path) -> None:
    make = language_model("tied Llama")
    whole = make()
    whole.save_pretrained(tmp_path)
    base = empty(lambda: type(whole.model)(whole.config))
    load(base, tmp_path, {"norm": "cpu:0"})
    assert torch.equal(base.state_dict()["norm.weight"], whole.model.norm.weight)
