"""Models that torch.export refuses: same results through hooks, and the reason is told."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import named
from model_list import torchvision_models
from splitting import assert_same, scatter_layers, step, twins
from torch import Tensor, nn
from unverified import unverified

from placer import DataFlow, devices
from placer.capture import capture_graph
from placer.capture.python_state.mutable_inputs import TemporaryMove
from placer.capture.pytrees import flatten
from placer.devices import tensor_moves
from placer.errors import CaptureError
from placer.testing import logical_devices

X = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(6, 4)


class _Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.drop = nn.Dropout(0.2)


class BranchOnAValue(_Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.first(x))
        return self.second(y) if y.sum() > 0 else self.third(y) - y


class Item(_Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        scale = y.abs().max().item()
        return self.third(self.second(y) / (scale if scale > 0.1 else 1.0))


class NumpyCall(_Base):
    def forward(self, x: Tensor) -> Tensor:
        import numpy

        y = self.first(x)
        weights = torch.from_numpy(numpy.sort(y.detach().cpu().numpy(), axis=0)).to(y.device)
        return self.second(y) * weights + self.third(x)


class StraightThrough(torch.autograd.Function):
    """Its backward is not what autograd would make of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 10).round() / 10

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


class CustomFunction(_Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(StraightThrough.apply(self.first(x))) + self.third(x)


class _Product(torch.autograd.Function):
    """It keeps what two layers give it for its backward pass."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        ctx.save_for_backward(one, other)
        return one * other

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        one, other = ctx.saved_tensors
        return gradients[0] * other, gradients[0] * one


_product = _Product.apply


class FunctionOfTwoLayers(_Base):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _product(self.first(x), self.second(x))  # type: ignore[no-untyped-call]
        return _Product.apply(self.third(y), self.first.weight[0])  # type: ignore[no-untyped-call, no-any-return]


class LoopOverData(_Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        for _ in range(int(y.abs().sum()) % 3 + 1):
            y = torch.tanh(self.second(y))
        return self.third(y)


class WhileNotConverged(_Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        while y.norm() > 0.5:
            y = 0.5 * torch.tanh(y)
        y = self.second(y)
        return self.third(y)


class ToList(_Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        order = sorted(range(len(y)), key=y.sum(dim=1).tolist().__getitem__)
        return self.third(self.second(y)[order])


class BooleanSelection(_Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        rows = [self.second(row) if row.sum() > 0 else self.third(row) for row in y]
        return torch.stack(rows)


class StochasticDepth(_Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in (self.second, self.third):
            if not (self.training and torch.rand([]) < 0.5):
                x = x + layer(x)
        return x


class GrowsAList(_Base):
    """Layers add to a list, and replace what is in an object, that they are given; as attention
    does in a cache."""

    class _Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, states: list[Tensor], seen: dict[str, Any]) -> Tensor:
            result: Tensor = self.linear(x)
            states.append(result)
            seen["sum"] = seen["sum"] + result
            seen["all"][-1] = (seen["all"][-1][0] + result, states[0])
            return result

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self._Adds(), self._Adds()

    def forward(self, x: Tensor) -> Any:
        states: list[Tensor] = []
        seen: dict[str, Any] = {"sum": torch.zeros_like(x), "all": [(x, x)]}
        y = self.second(self.first(x, states, seen), states, seen)
        scale = 2.0 if y.sum().item() > 1e9 else 1.0
        return self.third(y) * scale, states, seen


class SharesAList(_Base):
    """A module leaves its result in a list that the model has, too."""

    class _Leaves(nn.Module):
        def __init__(self, results: list[Tensor]) -> None:
            super().__init__()
            self.linear, self.results = nn.Linear(4, 4), results

        def forward(self, x: Tensor) -> Tensor:
            self.results[0] = self.linear(x)
            return x

    def __init__(self) -> None:
        super().__init__()
        self.results = [torch.zeros(1)]
        self.second = self._Leaves(self.results)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.third(self.second(self.first(x)))
        return y + self.results[0]


class Nonzero(_Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        index = (y[:, 0] > 0).nonzero().flatten()
        if len(index) == 0:
            return self.third(y)
        return self.second(y).index_add(0, index, self.third(y[index]))


class ReturnsAPythonNumber(_Base):
    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.first(x)
        return {"y": self.third(self.second(y)), "largest": float(y.detach().max())}


REFUSED: list[type[nn.Module]] = [
    BranchOnAValue,
    Item,
    NumpyCall,
    CustomFunction,
    FunctionOfTwoLayers,
    LoopOverData,
    GrowsAList,
    SharesAList,
    WhileNotConverged,
    ToList,
    BooleanSelection,
    StochasticDepth,
    Nonzero,
    ReturnsAPythonNumber,
]


def _transformer(name: str) -> Callable[[], nn.Module]:
    pair = {
        "encoder_layers": 3,
        "decoder_layers": 3,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
    }
    pair |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "d_model": 16, "vocab_size": 40}
    tokens = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    drops = {"encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5}

    def make() -> nn.Module:
        torchvision_models()  # transformers imports torchvision
        transformers = pytest.importorskip("transformers")
        if name == "OPT":
            config = transformers.OPTConfig(
                num_hidden_layers=3,
                hidden_size=16,
                word_embed_proj_dim=16,
                num_attention_heads=2,
                ffn_dim=16,
                vocab_size=40,
                max_position_embeddings=32,
                layerdrop=0.5,
            )
            model = transformers.OPTForCausalLM(config)
        elif name == "BART":
            config = transformers.BartConfig(
                **pair, **tokens, **drops, max_position_embeddings=32, forced_eos_token_id=2
            )
            model = transformers.BartForConditionalGeneration(config)
        else:
            config = transformers.WhisperConfig(
                **pair,
                **tokens,
                **drops,
                num_mel_bins=4,
                max_source_positions=8,
                max_target_positions=16,
            )
            model = transformers.WhisperForConditionalGeneration(config)
        assert isinstance(model, nn.Module)
        return model

    return make


def _transformer_inputs(name: str) -> dict[str, Tensor]:
    torch.manual_seed(5)
    if name == "Whisper":
        return {
            "input_features": torch.randn(2, 4, 16, dtype=torch.float64),
            "decoder_input_ids": torch.randint(3, 40, (2, 5)),
        }
    return {"input_ids": torch.randint(3, 40, (2, 6))}


# Others stop a capture where these do, at a number that is read from a tensor.
FURTHER = ["Item", "LoopOverData", "WhileNotConverged", "Nonzero"]


@pytest.mark.covering
@pytest.mark.parametrize("make", named({make.__name__: make for make in REFUSED}, FURTHER))
@pytest.mark.parametrize("fine_grained", [True, False], ids=["fine", "submodule"])
def test_a_refused_model_runs_split_with_the_same_results(
    make: type[nn.Module], fine_grained: bool
) -> None:
    model, reference = twins(make)
    with logical_devices(3):
        flow = DataFlow(model, fine_grained=fine_grained)
        scatter_layers(flow, 3, seed=2)
        split = step(flow, model, (X,), {})
        assert flow.not_captured_because
    assert_same(split, step(reference, reference, (X,), {}))


@pytest.mark.covering(every=4)
@pytest.mark.parametrize("name", ["OPT", "BART", "Whisper"])
@pytest.mark.parametrize("seed", [1, 2])
def test_transformers_with_layerdrop_run_split_with_the_same_results(name: str, seed: int) -> None:
    model, reference = twins(_transformer(name))
    inputs = _transformer_inputs(name)
    with logical_devices(4):
        flow = DataFlow(model, fine_grained=True)
        scatter_layers(flow, 4, seed)
        split = step(flow, model, (), inputs, seed)
        assert flow.not_captured_because
    assert_same(split, step(reference, reference, (), inputs, seed))


def test_a_model_refused_in_training_is_captured_in_eval() -> None:
    model, reference = twins(StochasticDepth)
    with logical_devices(3):
        flow = DataFlow(model)
        scatter_layers(flow, 3)
        flow(X)
        assert flow.not_captured_because
        flow.eval()
        split = step(flow, model, (X,), {})
        assert flow.not_captured_because == ""
        flow.train()
        assert flow.not_captured_because
    assert_same(split, step(reference.eval(), reference, (X,), {}))


def test_the_reason_names_what_torch_export_said() -> None:
    with logical_devices(2):
        flow = DataFlow(BranchOnAValue().double())
        scatter_layers(flow, 2)
        flow(X)
        assert "data-dependent" in flow.not_captured_because.lower()


def test_a_custom_function_keeps_its_own_backward() -> None:
    # torch.export keeps what its forward does and drops its backward: gradients were those of
    # round, zero.
    with pytest.raises(CaptureError, match="StraightThrough"):
        capture_graph(CustomFunction().double(), X, hooks=False)


@pytest.mark.parametrize("make", [Item, CustomFunction, BooleanSelection, ToList])
def test_chunks_run_one_after_another_as_the_unsplit_model_on_the_same_micro_batches(
    make: type[nn.Module],
) -> None:
    model, reference = twins(make)
    with logical_devices(3):
        flow = unverified(DataFlow(model))  # some read a value of all samples
        scatter_layers(flow, 3)
        y = flow(X, chunks=3)
        y.sum().backward()
    expected = torch.cat([reference(part) for part in X.chunk(3)])
    expected.sum().backward()
    torch.testing.assert_close(y.detach().cpu(), expected.detach(), atol=1e-10, rtol=1e-10)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-10, rtol=1e-10)


def _run_layers(model: nn.Module, inputs: list[Any], **options: Any) -> tuple[Any, list[Any]]:
    graph = capture_graph(model, *options.pop("given"), **options)
    values = dict(zip(graph.inputs, inputs, strict=True))
    for layer in graph.layers:
        state = [graph.state[name] for name in layer.state]
        writes = layer.function(torch.device("cpu"), state, [values[name] for name in layer.reads])
        values.update(zip(layer.writes, writes, strict=True))
    return graph, [values[name] for name in graph.outputs]


@pytest.mark.covering
@pytest.mark.parametrize(
    "make", [BranchOnAValue, Item, NumpyCall, CustomFunction, LoopOverData, Nonzero]
)
@pytest.mark.parametrize("granularity", ["auto", "fine"])
def test_the_layers_of_a_traced_model_compute_its_output(
    make: type[nn.Module], granularity: str
) -> None:
    model, _ = twins(make, training=False)
    graph, outputs = _run_layers(model, [X], given=((X,),), granularity=granularity)
    assert not graph.captured
    assert graph.not_captured_because
    assert len(graph.layers) >= 2
    torch.testing.assert_close(outputs[0], model(X), atol=1e-10, rtol=1e-10)


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("name", ["OPT", "BART", "Whisper"])
def test_the_layers_of_a_traced_transformer_compute_its_output(name: str) -> None:
    model, _ = twins(_transformer(name))
    for module in model.modules():
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
        if hasattr(module, "layerdrop"):
            module.layerdrop = 1e-12
    inputs = _transformer_inputs(name)
    graph, outputs = _run_layers(model, flatten(((), inputs))[0], given=((), inputs))
    assert not graph.captured
    expected = flatten(model(**inputs))[0]
    assert len(outputs) == len(expected)
    for ours, theirs in zip(outputs, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


def test_tracing_leaves_buffers_and_random_numbers_as_they_were() -> None:
    class Norm(BranchOnAValue):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))  # type: ignore[assignment]

    model, reference = twins(Norm)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    capture_graph(model, X)
    assert torch.equal(torch.get_rng_state(), before)
    for ours, theirs in zip(model.buffers(), reference.buffers(), strict=True):
        assert torch.equal(ours, theirs)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_on_meta_that_is_refused_says_what_to_do() -> None:
    with torch.device("meta"):
        model = BranchOnAValue()
    with pytest.raises(CaptureError, match="load weights"):
        capture_graph(model, torch.randn(2, 4, device="meta"))


def test_an_error_of_the_model_itself_is_told() -> None:
    with pytest.raises(CaptureError, match="fails on the example inputs"):
        capture_graph(nn.Linear(4, 4), torch.randn(2, 7))


def test_an_input_that_the_model_refuses_itself_does_not_send_later_ones_through_hooks() -> None:
    # The failed capture was held against the mode, and every later batch ran through hooks.
    flow = DataFlow(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), device_ids=["cpu:0"])
    flow.update_flow()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            flow(torch.randn(2, 5))
        flow(torch.randn(2, 4))
        assert flow.not_captured_because == ""


class State:
    def __init__(self) -> None:
        self.latest: Tensor | None = None
        self.seen: list[Tensor] = []
        self.calls = 0


class KeepsInAnObject(_Base):
    """An object that the model has is written to in every call, as a cache of one's own is."""

    def __init__(self) -> None:
        super().__init__()
        self.state = State()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        if self.state.latest is not None:
            y = y + self.state.latest
        self.state.latest = y.detach()
        self.state.seen.append(y.detach())
        self.state.calls += 1
        result: Tensor = self.third(self.second(y)) * self.state.calls + self.state.seen[0]
        return result


def test_an_object_that_the_model_has_is_written_to_in_every_call() -> None:
    model, reference = twins(KeepsInAnObject)
    with logical_devices(3), torch.no_grad():
        flow = DataFlow(model)
        scatter_layers(flow, 3, seed=2)
        for call in range(3):
            torch.testing.assert_close(flow(X).cpu(), reference(X), msg=str(call))
        assert "of a State" in flow.not_captured_because
        state: Any = model.state
        assert (state.calls, len(state.seen), type(state.latest)) == (3, 3, Tensor)


class LooksUp(_Base):
    """A table that an object makes when it is first asked."""

    def __init__(self) -> None:
        super().__init__()
        self.state = State()

    def forward(self, x: Tensor) -> Tensor:
        if self.state.latest is None:
            self.state.latest = torch.linspace(0, 1, 4, dtype=x.dtype, device=x.device)
        result: Tensor = self.second(self.first(x) * self.state.latest.to(x.device))
        return result


def test_a_table_that_an_object_makes_at_first_is_real_and_the_model_is_captured_then() -> None:
    model, reference = twins(LooksUp)
    with logical_devices(3), torch.no_grad():
        flow = DataFlow(model)
        scatter_layers(flow, 3, seed=2)
        for _ in range(3):
            torch.testing.assert_close(flow(X).cpu(), reference(X))
        assert flow.not_captured_because == ""
        table: Any = model.state
        torch.testing.assert_close(table.latest.cpu(), torch.linspace(0, 1, 4, dtype=X.dtype))


class _Splits(_Base):
    """Refused for its branch; it gives a module on another device a whole and a part of it, which
    that writes to."""

    def __init__(self, whole_first: bool = False) -> None:
        super().__init__()
        self.third, self.whole_first = _WritesToAPart(), whole_first

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x))
        if y.sum() > 1e9:
            y = -y
        part = y[:, :2]
        z = self.third(y, part) if self.whole_first else self.third(part=part, whole=y)
        result: Tensor = z + y
        return result


class _WritesToAPart(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, whole: Tensor, part: Tensor) -> Tensor:
        part.mul_(2)
        whole.add_(1)
        return super().forward(whole)


class _Mapped(_Base):
    """Calls a module on another device for each sample by itself."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if y.sum() > 1e9:
            y = -y
        result: Tensor = self.third(torch.func.vmap(self.second)(y))
        return result


@pytest.mark.parametrize(
    ("make", "elsewhere"),
    [(_Splits, "third"), (lambda: _Splits(whole_first=True), "third"), (_Mapped, "second")],
    ids=["part", "whole", "vmap"],
)
def test_what_a_module_on_another_device_is_given_is_to_it_what_it_is_here(
    make: Callable[[], nn.Module], elsewhere: str
) -> None:
    model, whole = twins(make)
    expected = step(whole, whole, [X], {})
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus |= dict.fromkeys(flow.layer_gpus, 0) | {elsewhere: 1}
        flow.update_flow()
        assert_same(step(flow, model, [X], {}), expected)
    assert flow.not_captured_because


def test_parts_of_a_whole_that_are_far_apart_are_moved_by_themselves() -> None:
    with logical_devices(2) as places:
        table = torch.zeros(100, 2, device=places[0])
        one, two = TemporaryMove(places[1]).moved((table[0], table[9]))
        assert one.untyped_storage().nbytes() == two.untyped_storage().nbytes() == one.nbytes
        assert one.untyped_storage()._cdata != two.untyped_storage()._cdata


class _Notes:
    """What a cache is: tensors of several layers, each of which uses its own."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []


class _Step(nn.Module):
    def __init__(self, place: int) -> None:
        super().__init__()
        self.place, self.layer = place, nn.Linear(4, 4)

    def forward(self, x: Tensor, notes: _Notes) -> Tensor:
        x = self.layer(x)
        if self.place == len(notes.seen):
            notes.seen.append(x)
        notes.seen[self.place] = notes.seen[self.place] + x
        return x


class _Noting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(map(_Step, range(3)))

    def forward(self, x: Tensor, notes: _Notes) -> Tensor:
        for each in self.steps:
            x = each(x, notes)
        return x * (1 if x.sum() > 0 else 2)


def test_what_an_object_holds_stays_where_it_is_when_modules_are_entered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, whole = twins(_Noting)
    ours, theirs, copies = _Notes(), _Notes(), []
    copy = tensor_moves.copy
    monkeypatch.setattr(tensor_moves, "copy", lambda *given: copies.append(given) or copy(*given))
    with logical_devices(2), torch.no_grad():
        flow = DataFlow(model, fine_grained=False)
        flow.layer_gpus |= {"steps.0": 0, "steps.1": 1, "steps.2": 1}
        flow.update_flow()
        for _ in range(3):
            copies.clear()
            result = flow(X, ours)
        # the input, what goes from step to step, the result
        assert len(copies) <= 3
        assert [str(devices.location(one)) for one in ours.seen] == ["cpu:0", "cpu:1", "cpu:1"]
    assert flow.not_captured_because
    expected = [whole(X, theirs) for _ in range(3)][-1]
    torch.testing.assert_close(result.cpu(), expected.detach())
    for one, other in zip(ours.seen, theirs.seen, strict=True):
        torch.testing.assert_close(one.cpu(), other.detach())


_WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "+=": operator.iadd,
    "-=": operator.isub,
    "*=": operator.imul,
    "/=": operator.itruediv,
    "//=": operator.ifloordiv,
    "%=": operator.imod,
    "add_": Tensor.add_,
    "item": lambda view, other: operator.setitem(view, slice(None), other),
    "out": lambda view, other: torch.mul(other, 2.0, out=view),
    "out of several": lambda view, other: torch.max(
        other, 1, out=(view[:, 0], torch.zeros(1, dtype=torch.int64))
    ),
}
_BITWISE = {"&=": operator.iand, "|=": operator.ior, "^=": operator.ixor, "<<=": operator.ilshift}


class _WritesToAView(nn.Module):
    """Writes to a part of one layer's result by another's, and asks for a value so that it is not
    captured."""

    def __init__(self, write: Callable[[Tensor, Tensor], object], whole: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self._write, self._whole = write, whole

    def forward(self, x: Tensor) -> Tensor:
        h, k = self.first(x), self.second(x)
        if self._whole:
            h, k = (10 * h).long(), (10 * k).abs().long()
        self._write(h[:1], k[:1] if x.sum() > 0 else k[1:2])
        return h


@pytest.mark.covering(every=2)
@pytest.mark.parametrize("name", [*_WRITES, *_BITWISE])
def test_what_is_written_in_place_is_there_whatever_device_it_came_from(name: str) -> None:
    """``|=`` and the like, and ``out=``, wrote to a copy on the other device."""
    model, reference = twins(lambda: _WritesToAView((_WRITES | _BITWISE)[name], name in _BITWISE))
    x = torch.linspace(-1, 2, 12, dtype=torch.float64).reshape(3, 4)
    for first, second in ((0, 1), (1, 0)):
        with logical_devices(2), torch.no_grad():
            flow = DataFlow(model)
            flow.layer_gpus.update(first=first, second=second)
            flow.update_flow()
            torch.testing.assert_close(flow(x).cpu(), reference(x))
            assert flow.not_captured_because


class CopiesIntoAPart(_Base):
    def forward(self, x: Tensor) -> Tensor:
        y, z = self.first(x).clone(), self.second(x)
        y[:, :2].copy_(z[:, :2] if x.norm() > 0 else z[:, 2:])
        return self.third(y)


class CalculatesOnLists(_Base):
    def forward(self, x: Tensor) -> Tensor:
        y, z = self.first(x), self.second(x)
        products = torch._foreach_mul([y, z], [z, y] if x.norm() > 0 else [y, z])
        torch._foreach_addcmul_(products, [z, y], tensor2=[y, z.exp()], value=0.5)
        return self.third(products[0] + products[1] + torch._foreach_pow(2.0, products)[1])


@pytest.mark.parametrize("make", [CopiesIntoAPart, CalculatesOnLists])
def test_gradients_of_copies_and_of_operations_on_lists_cross_devices(
    make: type[nn.Module],
) -> None:
    # A copy of torch's own sent its gradient to no stand-in; lists met lists of other devices.
    model, reference = twins(make)
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus.update(first=0, second=1, third=0)
        flow.update_flow()
        split = step(flow, model, [X], {})
    assert flow.not_captured_because
    assert_same(split, step(reference, reference, [X], {}))


class _Shared(nn.Module):
    """A block whose last part another block calls, too."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.inner, self.shared = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), shared

    def forward(self, x: Tensor) -> Tensor:
        assert x.device == self.inner[0].weight.device
        result: Tensor = self.shared(self.inner(x))
        return result


def test_inside_a_module_on_one_device_only_what_others_call_has_hooks() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(_Shared(shared), _Shared(shared), nn.Sequential(nn.Tanh(), nn.Tanh()))
    expected = model(X.float())
    with logical_devices(2):
        flow = DataFlow(model)
        flow.layer_gpus.update({"0": "cpu:0", "1": "cpu:1", "2.0": "cpu:0", "2.1": "cpu:1"})
        flow.update_flow()
        with flow.applied():
            hooked = {name for name, one in model.named_modules() if one._forward_pre_hooks}
            torch.testing.assert_close(model(X.float()), expected, check_device=False)
    assert hooked == {"0", "0.shared", "1", "2", "2.0", "2.1"}
