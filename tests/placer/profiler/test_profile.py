"""What a profile says of layers, and that everything is left as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from small_profiles import TOKENS, quick_profile, small_cnn, small_gpt
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import placer
from placer import devices as hardware
from placer import zoo
from placer.errors import InputError, ProfilingError
from placer.profiler import measure as measuring
from placer.profiler import profile as profile_module
from placer.profiler import timing
from placer.profiler.conditions import CoreWaits
from placer.schema import Profile
from placer.zoo.resnet import BasicBlock, ResNet

TIMES = ("forward_ms", "backward_ms", "weight_grad_ms", "optimizer_ms", "spread", "host_ms")
WORKSPACES = ("forward", "backward", "recorded", "input_grad", "weight_grad")


def _total(profile: Profile, field: str) -> int:
    return sum(getattr(layer, field) for layer in profile.layers)


class _Batches(nn.Module):
    """A model with everything that a forward pass may change."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.frozen(self.drop(self.norm(self.first(x)))).relu_()
        return result


def _saved_by_the_whole(model: nn.Module, run: Callable[[], Any]) -> int:
    """The bytes that autograd keeps when the unsplit model runs, each storage once, without the
    model's state."""
    state = {
        tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())
    }
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in state:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        note(run())  # the result: a loss is behind it
    return sum(saved.values())


@pytest.mark.covering(every=2)
@pytest.mark.parametrize(
    ("model", "x", "granularity"),
    [
        (ResNet(BasicBlock, [1, 1, 1, 1], 10), torch.randn(2, 3, 32, 32), "submodule"),
        (zoo.unet(width=4), torch.randn(2, 3, 16, 16), "auto"),
        (small_gpt(dropout=0.1, tied=True), TOKENS, "auto"),
        (small_gpt(), TOKENS, "fine"),
    ],
    ids=["resnet", "unet", "gpt", "gpt-fine"],
)
def test_layers_and_edges_together_keep_what_the_unsplit_model_keeps(
    model: nn.Module, x: Tensor, granularity: str
) -> None:
    found = quick_profile(model, x, granularity=granularity)
    kept = _total(found, "saved_bytes") + sum(edge.bytes for edge in found.edges if edge.saved_by)
    assert kept == _saved_by_the_whole(model, lambda: model(x))


def test_a_misspelt_optimizer_is_told_in_inference_too() -> None:
    with pytest.raises(InputError, match="no optimizer 'adm'"):
        quick_profile(nn.Linear(8, 8), torch.randn(4, 8), training=False, optimizer="adm")


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adafactor"])
def test_state_adds_up_to_that_of_the_model_and_its_optimizer(optimizer: str) -> None:
    model = _Batches()
    found = quick_profile(model, torch.randn(4, 8), optimizer=optimizer, granularity="fine")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    real = getattr(torch.optim, found.optimizer or "")(trained)
    model(torch.randn(4, 8)).sum().backward()
    real.step()
    state = tree_leaves([dict(kept) for kept in real.state.values()])
    assert _total(found, "param_bytes") == sum(parameter.nbytes for parameter in model.parameters())
    assert _total(found, "grad_bytes") == sum(parameter.nbytes for parameter in trained)
    assert _total(found, "optimizer_bytes") == sum(
        item.nbytes for item in state if isinstance(item, Tensor)
    )
    assert _total(found, "buffer_bytes") == sum(buffer.nbytes for buffer in model.buffers())


def test_a_tied_parameter_counts_once_and_ties_its_layers() -> None:
    model = small_gpt(tied=True)
    found = quick_profile(model, TOKENS)
    assert _total(found, "param_bytes") == sum(parameter.nbytes for parameter in model.parameters())
    assert found.colocated == (("token_embedding", "head"),)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_and_the_generator_are_left_as_they_were(training: bool) -> None:
    model = _Batches()
    model.drop.eval()
    model(torch.randn(4, 8)).sum().backward()
    before = copy.deepcopy(model)
    parameters = list(model.parameters())
    gradients = [
        parameter.grad.clone() if parameter.grad is not None else None for parameter in parameters
    ]
    x = torch.randn(4, 8)
    random = torch.get_rng_state()
    quick_profile(model, x, training=training)
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == [
        module.training for module in before.modules()
    ]
    for name, tensor in before.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert list(map(id, model.parameters())) == list(map(id, parameters))
    for mine, old, gradient in zip(parameters, before.parameters(), gradients, strict=True):
        assert mine.requires_grad == old.requires_grad
        assert (mine.grad is None and gradient is None) or torch.equal(mine.grad, gradient)  # type: ignore[arg-type]


def test_the_example_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8))
    x = torch.randn(4, 8)
    before = x.clone()
    quick_profile(model, x)
    assert torch.equal(x, before)


def test_identical_layers_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from placer.profiler import measure

    timed = []
    real = measure.measure_time
    monkeypatch.setattr(
        measure,
        "measure_time",
        lambda *given, **named: (timed.append(None), real(*given, **named))[1],
    )
    found = quick_profile(
        nn.Sequential(*(nn.Linear(8, 8) for _ in range(10)), nn.Linear(8, 3)), torch.randn(2, 8)
    )
    assert len(found.layers) == 11
    assert len(timed) <= 3  # the first needs no gradient of its input
    assert found.layers[3].forward_ms == found.layers[7].forward_ms


def test_inference_has_no_backward() -> None:
    found = quick_profile(small_cnn(), torch.randn(2, 3, 8, 8), training=False)
    assert not found.training
    assert found.optimizer is None
    assert all(not layer.backward_ms for layer in found.layers)
    for field in ("grad_bytes", "optimizer_bytes", "saved_bytes", "backward_workspace_bytes"):
        assert _total(found, field) == 0
    assert all(edge.gradient_bytes == 0 and not edge.saved_by for edge in found.edges)


def test_edges_carry_the_bytes_of_their_values() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    found = quick_profile(model, torch.randn(2, 8), granularity="fine")
    assert [
        (edge.source, edge.targets, edge.bytes, edge.gradient_bytes, edge.saved_by)
        for edge in found.edges
    ] == [
        ("0", ("1",), 2 * 16 * 4, 2 * 16 * 4, ()),
        ("1", ("2",), 2 * 16 * 4, 2 * 16 * 4, ("1", "2")),
    ]


def test_a_kept_input_of_the_model_counts_in_the_layer_that_keeps_it() -> None:
    found = quick_profile(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)), torch.randn(2, 8))
    # the other one keeps the result
    assert [layer.saved_bytes for layer in found.layers] == [2 * 8 * 4, 2 * 4 * 4]


@pytest.mark.parametrize(
    "last", [nn.Tanh(), nn.LayerNorm(16)], ids=["kept by its layer too", "kept by no layer"]
)
def test_an_output_of_the_model_is_kept_in_the_layer_that_makes_it_for_the_loss(
    last: nn.Module,
) -> None:
    found = quick_profile(
        nn.Sequential(nn.Linear(8, 16), last), torch.randn(2, 8), granularity="fine"
    )
    # mean and deviation of each row
    inside = {"Tanh": 0, "LayerNorm": 2 * 2 * 4}[type(last).__name__]
    assert [layer.saved_bytes for layer in found.layers] == [2 * 8 * 4, inside + 2 * 16 * 4]


def test_the_largest_fragments_of_any_layer_go_to_the_reserve(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, told = profile_module.measure, []
    counted = iter([3, 5, 11, 2])

    def measure(*given: Any) -> Any:
        told.append(given[4])
        return real(*given)

    monkeypatch.setattr(profile_module, "measure", measure)
    monkeypatch.setattr(hardware, "fragmented_bytes", lambda _: next(counted))
    quick_profile(
        nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)),
        torch.randn(2, 8),
        granularity="fine",
        cache=False,
    )
    assert [list(found.values()) for found in told] == [[11]]


@pytest.mark.parametrize("training", [True, False])
def test_passes_of_gpus_take_pieces_that_are_not_full(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured() -> list[tuple[int, ...]]:
        model, x = (
            nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)),
            torch.randn(512, 512),
        )
        found = quick_profile(model, x, granularity="fine", training=training, cache=False)
        return [
            tuple(getattr(layer, f"{name}_workspace_bytes") for name in WORKSPACES)
            for layer in found.layers
        ]

    torch.manual_seed(0)
    plain, real = measured(), measuring.measure_memory
    monkeypatch.setattr(
        measuring, "measure_memory", lambda *given: replace(real(*given), in_segments=True)
    )
    for before, now in zip(plain, measured(), strict=True):
        # of the others, 0 stands for another workspace
        has = [True, True, *before[2:]]
        added = [8 * 2**20 if training and size else 0 for size in has]
        assert [size - old for size, old in zip(now, before, strict=True)] == added


def test_a_loss_that_needs_more_than_the_layer_before_it_takes_such_pieces_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measured() -> list[int]:
        found = quick_profile(
            nn.Linear(8, 8),
            torch.randn(64, 8),
            granularity="fine",
            cache=False,
            loss_fn=lambda output, target: (output.repeat(256, 64) ** 2).mean() - target.mean(),
            target=torch.zeros(64),
        )
        return [
            getattr(found.layers[0], f"{name}_workspace_bytes")
            for name in ("forward", "backward", "input_grad")
        ]

    torch.manual_seed(0)
    plain, real = measured(), measuring.measure_memory
    assert min(plain) > 8 * 2**20
    monkeypatch.setattr(
        measuring, "measure_memory", lambda *given: replace(real(*given), in_segments=True)
    )
    assert [now - before for now, before in zip(measured(), plain, strict=True)] == [8 * 2**20] * 3


def test_no_gradient_is_sent_for_whole_numbers() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(4, 10)
            self.table = nn.Embedding(10, 3)

        def forward(self, x: Tensor) -> Tensor:
            best = self.score(x).argmax(-1)
            result: Tensor = self.table(best)
            return result

    (edge,) = quick_profile(Lookup(), torch.randn(2, 4)).edges
    assert (edge.bytes, edge.gradient_bytes) == (2 * 8, 0)


def test_each_type_of_device_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    real = profile_module.measure_layers

    def count(graph: Any, inputs: Any, device: torch.device, *rest: Any) -> Any:
        measured.append(str(device))
        return real(graph, inputs, device, *rest)

    kind = {0: "old", 1: "old", 2: "new"}
    monkeypatch.setattr(profile_module, "type_name", lambda device: kind[device.index])
    monkeypatch.setattr("placer.devices.type_name", lambda device: kind[device.index])
    monkeypatch.setattr(profile_module, "measure_layers", count)
    found = quick_profile(nn.Linear(4, 4), torch.randn(2, 4), 3)
    assert sorted(measured) == ["cpu:0", "cpu:2"]
    assert set(found.layers[0].forward_ms) == set(found.layers[0].backward_ms) == {"old", "new"}


def test_backward_passes_are_told_apart_in_halves() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256), nn.ReLU())
    found = quick_profile(model, torch.randn(64, 256), granularity="fine", repeats=5)
    first, second, relu = found.layers
    (kind,) = first.forward_ms
    assert 0 < first.weight_grad_ms[kind] < first.backward_ms[kind]
    assert 0 < second.weight_grad_ms[kind] < second.backward_ms[kind]
    assert (relu.weight_grad_ms, relu.weight_half_ms(kind)) == ({}, 0.0)
    assert second.weight_half_ms(kind) == second.weight_grad_ms[kind]
    untold = second.model_copy(update={"weight_grad_ms": {}})
    assert untold.weight_half_ms(kind) == second.backward_ms[kind] / 2


def test_the_optimizers_step_is_timed_once_for_each_parameter() -> None:
    found = quick_profile(small_gpt(tied=True), TOKENS, granularity="fine")
    times = {layer.name: sum(layer.optimizer_ms.values()) for layer in found.layers}
    assert times["token_embedding"] > 0
    assert times["head"] == 0  # shares the embedding's weight
    assert all(
        not layer.optimizer_ms
        for layer in quick_profile(small_gpt(), TOKENS, optimizer=None).layers
    )
    assert all(
        not layer.optimizer_ms
        for layer in quick_profile(small_gpt(), TOKENS, training=False).layers
    )


def test_a_profile_says_what_it_was_made_of() -> None:
    found = quick_profile(small_cnn(), torch.randn(2, 3, 8, 8), 2, memory_bytes=2**28)
    assert (found.model, found.batch_size, found.granularity, found.captured) == (
        "Sequential",
        2,
        "auto",
        True,
    )
    assert found.versions["torch"] == torch.__version__
    assert found.cluster is not None
    assert [device.memory_bytes for device in found.cluster.devices] == [2**28, 2**28]
    assert Profile.model_validate_json(found.to_json()) == found


@pytest.mark.exhaustive
def test_a_profile_of_two_hundred_layers_is_small() -> None:
    found = quick_profile(
        zoo.gpt(layers=25, width=32, heads=2, context=16, vocabulary=50),
        TOKENS,
        4,
        granularity="fine",
    )
    assert len(found.layers) > 200
    # a longer name, and numbers as long as those of a model a hundred thousand times as large
    gpu = "NVIDIA H200"
    layers = [
        layer.model_copy(
            update={name: {gpu: 12.34} for name in TIMES if getattr(layer, name)}
            | {name: 100_003 * value for name, value in layer if name.endswith("_bytes") and value}
        )
        for layer in found.layers[:200]
    ]
    names = {layer.name for layer in layers}
    edges = [
        edge.model_copy(
            update={"bytes": 100_003 * edge.bytes, "gradient_bytes": 100_003 * edge.bytes}
        )
        for edge in found.edges
        if {edge.source, *edge.targets} <= names
    ]
    large = found.model_copy(update={"layers": tuple(layers), "edges": tuple(edges)})
    assert len(large.to_json()) < 100 * 1024


def test_a_failing_layer_is_named() -> None:
    found = small_gpt()
    with pytest.raises(
        ProfilingError,
        match="layer 'token_embedding' failed on cpu:0: IndexError: index out of range",
    ):
        quick_profile(found, torch.full((2, 16), 50))


def test_example_inputs_that_a_failing_layer_reads_are_told() -> None:
    with pytest.raises(
        ProfilingError, match=r"same dtype.*reads the example inputs: int64 of shape \(2, 4\)\."
    ):
        quick_profile(nn.Linear(4, 4), torch.ones(2, 4, dtype=torch.int64))


def test_a_layer_that_does_not_fit_is_named_with_its_bytes() -> None:
    class Huge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.last = nn.Linear(4, 2**45, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.last(self.first(x))
            return result

    with torch.device("meta"):
        model = Huge()
    with pytest.raises(
        ProfilingError, match=r"layer 'last' does not fit on cpu:0: its state takes 512.0 TiB, its"
    ):
        quick_profile(model, torch.randn(2, 4))


class _SharedView(nn.Module):
    """A view of a parameter of one layer, which another one reads, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 8))
        self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        table = self.table.unsqueeze(0)
        return self.first(x + table).sum() + self.second(table).sum()


def test_a_view_of_a_parameter_that_two_layers_read_is_measured_in_both() -> None:
    assert len(quick_profile(_SharedView(), torch.randn(2, 6, 8)).layers) == 2


def test_a_lazy_module_that_has_not_run_is_named() -> None:
    with pytest.raises(InputError, match=r"'0\.weight' is not initialised; run the model once"):
        quick_profile(nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 4)), torch.randn(4, 5))


def test_a_model_without_operations_has_nothing_to_place() -> None:
    with pytest.raises(ProfilingError, match="Identity has no operations"):
        quick_profile(nn.Identity(), torch.randn(2))


@pytest.mark.parametrize(("apart", "told"), [(0.05, False), (0.5, True)])
def test_timings_that_are_far_apart_are_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, apart: float, told: bool
) -> None:
    monkeypatch.setattr(timing, "spread", lambda times: apart)
    model, x = small_cnn(), torch.randn(2, 3, 8, 8)
    found = placer.profile(model, x, 2, training=False, progress=False, repeats=1)
    (kind,) = found.layers[0].forward_ms
    assert (f"timings on {kind} are 50% apart: other programs kept it busy" in caplog.text) == told


@pytest.mark.parametrize(("waited", "told"), [(0.33, False), (0.5, True)])
def test_a_cpu_on_which_threads_waited_for_a_core_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, waited: float, told: bool
) -> None:
    # Beside a program that never rests all timings are as long: they lay 0% apart.
    monkeypatch.setattr(timing, "spread", lambda times: 0.0)
    monkeypatch.setattr(CoreWaits, "share", lambda waits: waited)
    quick_profile(small_cnn(), torch.randn(2, 3, 8, 8), training=False)
    assert ("a thread waited for a core 50% of its time" in caplog.text) == told


@pytest.mark.parametrize("repeats", [0, -1, 1.5, "3"])
def test_layers_must_be_timed_at_least_once(repeats: Any) -> None:
    with pytest.raises(
        InputError, match=rf"ProfileOptions\.repeats: should be .*, not {repeats!r}"
    ):
        quick_profile(nn.Linear(4, 4), torch.randn(2, 4), repeats=repeats)


@pytest.mark.parametrize("training", ["no", None])
def test_a_word_for_whether_training_is_measured_is_refused(training: Any) -> None:
    # torch's ValueError came
    with pytest.raises(InputError, match=f"training is {training!r}; give True or False"):
        quick_profile(nn.Linear(4, 4), torch.randn(2, 4), training=training)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (nn.Linear, r"model is the class Linear; give an instance, such as Linear\(\)"),
        ([nn.Linear(4, 4)], "is a list; g"),
    ],
)
def test_what_is_no_model_is_refused(given: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        quick_profile(given, torch.randn(2, 4))


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("CUDA out of memory. Tried to allocate 32 MiB.\nand more", r".* 32 MiB"),
        ("", "OutOfMemoryError"),  # was an IndexError
    ],
)
def test_a_device_without_memory_to_begin_with_is_named(
    message: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(device: torch.device) -> None:
        raise torch.OutOfMemoryError(message)

    monkeypatch.setattr(profile_module, "warm_libraries", full)
    with pytest.raises(
        ProfilingError,
        match=rf"cpu:0 has too little memory free .* out of devices= \({reason}\)$",
    ):
        placer.profile(small_cnn(), torch.randn(2, 3, 16, 16), ["cpu:0"], progress=False)
