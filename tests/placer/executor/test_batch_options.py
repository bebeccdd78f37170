"""What a micro-batch means: declared batch dimensions, lists of samples, reductions; right, or
refused."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import named
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import placer
from placer import BatchOptions
from placer.errors import BatchError, InputError, StageError
from placer.executor.checks import batch_check
from placer.executor.placed_model import PlacedModel

DEVICES = ["cpu:0", "cpu:1"]
PATHS = ["captured", "hooks"]


def _refused(model: nn.Module) -> None:
    """Let torch.export refuse the model, as its forward branches on a value."""
    kind = type(model)

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (
            kind.forward(self, *args, **kwargs)
            if bool(next(self.parameters()).sum() > -1e9)
            else None
        )

    model.__class__ = type(kind.__name__, (kind,), {"forward": forward})


def placed(model: nn.Module, path: str = "captured") -> placer.DataFlow:
    """The model split over two stand-ins by its children, in half."""
    if path == "hooks":
        _refused(model)
    names = [name for name, _ in model.named_children()]
    flow = placer.DataFlow(model, device_ids=DEVICES)
    flow.layer_gpus.clear()
    flow.layer_gpus.update(
        {"": 0} | {name: int(place >= len(names) / 2) for place, name in enumerate(names)}
    )
    flow.update_flow()
    return flow


@pytest.fixture(autouse=True)
def stand_ins() -> Any:
    torch.manual_seed(0)
    with placer.testing.logical_devices(2):
        yield


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: one.grad.to("cpu") for name, one in model.named_parameters() if one.grad is not None
    }


def unsplit(
    model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], inputs: Any, target: Any
) -> tuple[Tensor, Any]:
    """The loss and the gradients of a copy that is not split."""
    twin = copy.deepcopy(model).to("cpu")
    twin.zero_grad()
    loss = loss_fn(twin(*inputs) if isinstance(inputs, tuple) else twin(inputs), target)
    loss.backward()
    return loss.detach(), gradients(twin)


def check_step(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Any,
    target: Any,
    options: BatchOptions | None,
    path: str = "captured",
    chunks: tuple[int, ...] = (1, 4),
) -> None:
    """Compare loss and gradients of steps with those of the unsplit model."""
    want, want_gradients = unsplit(model, loss_fn, inputs, target)
    flow = placed(model, path)
    for count in chunks:
        loss = flow.train_step(loss_fn, batch_options=options)(inputs, target, chunks=count)
        torch.testing.assert_close(loss.to("cpu", want.dtype), want)
        torch.testing.assert_close(gradients(model), want_gradients)
    flow.undo()


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(6, 6)
        self.decode = nn.Linear(3, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.encode(x).chunk(2, 1)
        return self.decode(mean), mean, log_var


def elbo(output: Any, x: Tensor) -> Tensor:
    made, mean, log_var = output
    rebuilt = F.binary_cross_entropy_with_logits(made, x, reduction="sum")
    return rebuilt - 0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum()


class Classifier(nn.Module):
    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())


class Tagger(nn.Module):
    """Sequence first: (length, batch). Each step reads all earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.body = nn.Linear(8, 8)
        self.out = nn.Linear(8, 9)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.body(self.embed(ids)).cumsum(0).tanh())


class RecurrentTagger(Tagger):
    """A Tagger whose steps an LSTM takes, which is captured in many operations."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(8, 8)  # type: ignore[assignment]

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.body(self.embed(ids))[0])


class Encoder(nn.Module):
    """Sequence first, as torch's own transformer is by default."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.body = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        self.out = nn.Linear(8, 9)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.body(self.embed(ids)))


class Detector(nn.Module):
    """A list of images of unlike sizes; with targets, a loss; without, a list of dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(1, 8, 3, padding=1)
        self.b = nn.Linear(8, 2)

    def forward(self, images: list[Tensor], targets: list[dict[str, Tensor]] | None = None) -> Any:
        boxes = [self.b(self.a(image[:, None]).relu().mean((0, 2, 3))) for image in images]
        if targets is None:
            return [
                {"box": box, "size": torch.tensor(image.shape)}
                for box, image in zip(boxes, images, strict=True)
            ]
        losses = [
            (box - target["box"]).pow(2).mean() for box, target in zip(boxes, targets, strict=True)
        ]
        return sum(losses) / len(losses)


def _images(frames: int = 3) -> list[Tensor]:
    return [torch.randn(frames, 6, 5 + place) for place in range(4)]


# Sums and means of losses.


@pytest.mark.parametrize("path", PATHS)
def test_a_sum_loss_is_refused_before_anything_is_trained_and_right_once_declared(
    path: str,
) -> None:
    model, x = VAE(), torch.rand(8, 6)
    before = copy.deepcopy(model.state_dict())
    flow = placed(model, path)
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(
        BatchError, match=r"the loss .* sum over samples.*BatchOptions\(reduction='sum'\)"
    ):
        flow.train_step(elbo, optimizer)(x, x, chunks=4)
    assert not optimizer.state and not gradients(model)
    assert all(
        torch.equal(value.to("cpu"), before[name]) for name, value in model.state_dict().items()
    )
    flow.undo()
    check_step(model, elbo, x, x, BatchOptions(reduction="sum"), path)


def test_a_mean_over_a_constant_is_a_sum() -> None:
    def loss_fn(y: Tensor, t: Tensor) -> Tensor:
        return F.mse_loss(y, t, reduction="sum") / 640

    model, x, t = Classifier(), torch.randn(8, 6), torch.randn(8, 5)
    with pytest.raises(BatchError, match="reduction='sum'"):
        placed(model).train_step(loss_fn)(x, t, chunks=2)
    check_step(model, loss_fn, x, t, BatchOptions(reduction="sum"))


def test_torchs_sum_losses_name_the_declaration_before_anything_runs() -> None:
    flow = placed(Classifier())
    with pytest.raises(
        InputError, match=r"CrossEntropyLoss has reduction='sum'.*BatchOptions\(reduction='sum'\)"
    ):
        flow.train_step(nn.CrossEntropyLoss(reduction="sum"))
    with pytest.raises(InputError, match="reduction='mean'"):
        flow.train_step(nn.CrossEntropyLoss(), batch_options=BatchOptions(reduction="sum"))
    check_step(
        Classifier(),
        nn.CrossEntropyLoss(reduction="sum"),
        torch.randn(8, 6),
        torch.randint(5, (8,)),
        BatchOptions(reduction="sum"),
    )


# Samples that meet one another.


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(6, 8)
        self.text = nn.Linear(5, 8)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.image(x), dim=1), F.normalize(self.text(y), dim=1)


def _clip(output: Any, _: Any) -> Tensor:
    similar = output[0] @ output[1].T * 10
    return F.cross_entropy(similar, torch.arange(len(similar), device=similar.device))


def _batch_hard(output: Any, _: Any) -> Tensor:
    apart = torch.cdist(output[0], output[1])
    return (apart.diagonal() - apart.min(1).values + 0.2).relu().mean()


def _in_batch(output: Any, _: Any) -> Tensor:
    negatives = (output[0] @ output[1].roll(1, 0).T).exp().sum(1)
    return negatives.log().mean()


@pytest.mark.covering
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "loss_fn", [_clip, _batch_hard, pytest.param(_in_batch, marks=pytest.mark.exhaustive)]
)
def test_a_loss_that_compares_samples_is_refused_with_chunks_and_right_without(
    loss_fn: Any, path: str
) -> None:
    model, inputs = Towers(), (torch.randn(8, 6), torch.randn(8, 5))
    with pytest.raises(BatchError, match=r"the loss .*chunks=1"):
        placed(model, path).train_step(loss_fn)(inputs, chunks=4)
    check_step(model, loss_fn, inputs, None, None, path, chunks=(1,))


class Meeting(nn.Module):
    """A softmax over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.first(x)
        return {"logits": self.second(y), "attention": self.second(y).softmax(0)}


@pytest.mark.parametrize("path", PATHS)
def test_an_output_in_which_samples_meet_is_named(path: str) -> None:
    flow, x = placed(Meeting(), path), torch.randn(8, 6)
    with pytest.raises(BatchError, match=r"output 'attention' .*chunks=1"):
        flow(x, chunks=2)
    parts = flow(x, chunks=2, batch_options=BatchOptions(outputs={"attention": "list"}))[
        "attention"
    ]
    want = [flow(half)["attention"] for half in x.split(4)]
    torch.testing.assert_close(parts, want)


class Codebook(nn.Module):
    """Nearest codes, which follow the inputs: a buffer that each forward pass changes and reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.codes).argmin(1)
        codes = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                self.codes.mul_(0.9).add_(0.1 * F.one_hot(nearest, 5).to(x.dtype).T @ x)
        return x + (codes - x).detach()


class Passes(nn.Module):
    """Counts calls in a buffer, and reads the number if asked to."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x * self.calls if self.reads else x


class Queue(nn.Module):
    """Keys of earlier samples, as in momentum contrast: afterwards right for any cut."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.randn(16, 6))

    def forward(self, x: Tensor) -> Tensor:
        keys = self.keys.clone()
        result: Tensor = x + (x @ keys.T).softmax(1) @ keys
        with torch.no_grad():
            self.keys.copy_(torch.cat([self.keys[len(x) :], x.detach()]))
        return result


def _with_body(body: nn.Module) -> Classifier:
    model = Classifier()
    model.body = nn.Sequential(nn.Linear(6, 6), body, nn.Linear(6, 8))  # type: ignore[assignment]
    return model


CARRIES: dict[str, Callable[[], nn.Module]] = {
    "codes": Codebook,
    "weight_u": lambda: nn.utils.spectral_norm(nn.Linear(6, 6)),
    "weight.0._u": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
    "calls": lambda: Passes(True),
    "keys": Queue,
}


@pytest.mark.covering
@pytest.mark.parametrize("name", CARRIES)
@pytest.mark.parametrize("path", PATHS)
def test_a_buffer_that_one_micro_batch_writes_and_the_next_one_reads_is_named(
    path: str, name: str
) -> None:
    torch.manual_seed(0)
    model = _with_body(CARRIES[name]())
    whole, x, target = copy.deepcopy(model), torch.randn(8, 6), torch.randn(8, 5)
    step = placed(model, path).train_step(F.mse_loss)
    with pytest.raises(BatchError, match=rf"writes .*{name}'.*chunks=1"):
        step(x, target, chunks=2)
    torch.testing.assert_close(step(x, target, chunks=1).to("cpu"), F.mse_loss(whole(x), target))


@pytest.mark.parametrize("path", PATHS)
def test_a_buffer_that_is_only_written_follows_micro_batches_with_a_warning(path: str) -> None:
    model = _with_body(Passes(False))
    whole = copy.deepcopy(model)
    flow, x = placed(model, path), torch.randn(8, 6)
    with pytest.warns(UserWarning, match=r"'body\.1\.calls': 1 and 2.*chunks=1"):
        found = flow(x, chunks=2)
    torch.testing.assert_close(found.to("cpu"), whole(x))


@pytest.mark.parametrize("path", PATHS)
def test_a_loss_that_differentiates_the_results_is_compared(path: str) -> None:
    def loss_fn(y: Tensor, target: Tensor) -> Tensor:
        (slopes,) = torch.autograd.grad(y.square().sum(), y, create_graph=True)
        return F.mse_loss(y, target) + slopes.square().sum()

    step = placed(Classifier(), path).train_step(loss_fn)
    with pytest.raises(BatchError, match="the loss of a batch"):
        step(torch.randn(8, 6), torch.randn(8, 5), chunks=2)


class Balanced(nn.Module):
    """A mixture's scores, and a penalty that depends on the mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Linear(6, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.body(x).softmax(1)
        return self.last(shares), (shares.mean(0) ** 2).sum()


@pytest.mark.parametrize("path", PATHS)
def test_a_model_that_writes_a_power_as_an_operator_is_compared(path: str) -> None:
    with pytest.raises(BatchError, match="output '1'"):
        placed(Balanced(), path)(torch.randn(8, 6), chunks=2)


@pytest.mark.parametrize("path", PATHS)
def test_a_model_that_cannot_be_compared_causes_a_warning(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no such run")

    monkeypatch.setattr(batch_check.BatchChecks, "_run", fail)
    with pytest.warns(UserWarning, match="not compared .* ValueError: no such run"):
        placed(Classifier(), path)(torch.randn(8, 6), chunks=2)


@pytest.mark.filterwarnings("error:micro-batches were not compared")
@pytest.mark.parametrize("path", PATHS)
def test_a_batch_after_inputs_of_a_wrong_size_is_compared(path: str) -> None:
    # the model's error came with a warning, and batches of the same kind were taken as known.
    flow = placed(Balanced(), path)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        flow(torch.randn(8, 7), chunks=2)
    with pytest.raises(BatchError, match="output '1'"):
        flow(torch.randn(8, 6), chunks=2)


# Labels that do not count.


def _ignoring(index: int, weight: Tensor | None = None) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda y, t: F.cross_entropy(
        y, t, ignore_index=index, weight=None if weight is None else weight.to("cpu").to(y.device)
    )


def _by_hand(y: Tensor, t: Tensor) -> Tensor:
    """A mean over the labels that are not 0."""
    return (F.cross_entropy(y, t, reduction="none") * (t != 0)).sum() / (t != 0).sum()


UNEQUAL = torch.tensor([0, 0, 0, 1, 2, 3, 4, 1])
EQUAL = torch.tensor([0, 1, 2, 3, 0, 4, 3, 2])


@pytest.mark.parametrize("path", PATHS)
def test_unequal_numbers_of_ignored_labels_are_refused_or_weighed(path: str) -> None:
    model, x, loss_fn = Classifier(), torch.randn(8, 6), _by_hand
    with pytest.raises(BatchError, match=r"BatchOptions\(weigh=f\)"):
        placed(model, path).train_step(loss_fn)(x, UNEQUAL, chunks=2)
    # seen, as it is torch's own mean
    check_step(model, _ignoring(0), x, UNEQUAL, None, path)
    check_step(
        model, loss_fn, x, UNEQUAL, BatchOptions(weigh=lambda _, t: t != 0), path, chunks=(2,)
    )
    check_step(model, loss_fn, x, EQUAL, None, path, chunks=(2,))


@pytest.mark.covering
@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.CrossEntropyLoss(ignore_index=0),
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])),
        nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.1),
    ],
)
@pytest.mark.parametrize("path", PATHS)
def test_torchs_weighted_losses_are_right_without_a_declaration(loss_fn: Any, path: str) -> None:
    check_step(Classifier(), loss_fn, torch.randn(8, 6), UNEQUAL, None, path)


def test_class_weights_of_a_function_are_refused_or_weighed() -> None:
    weight = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    model, x = Classifier(), torch.randn(8, 6)

    def loss_fn(y: Tensor, t: Tensor) -> Tensor:
        each = weight.to("cpu").to(y.device)[t]
        return (F.cross_entropy(y, t, reduction="none") * each).sum() / each.sum()

    with pytest.raises(BatchError, match="weigh"):
        placed(model).train_step(loss_fn)(x, UNEQUAL, chunks=4)
    # seen, as it is torch's own mean
    check_step(model, _ignoring(-100, weight), x, UNEQUAL, None)
    check_step(model, loss_fn, x, UNEQUAL, BatchOptions(weigh=lambda _, t: weight[t]))


class WithLoss(Classifier):
    """A model that computes its own loss, a mean over labels, as those of transformers do."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        return {"loss": F.cross_entropy(logits, labels, ignore_index=0), "logits": logits}


@pytest.mark.parametrize("path", PATHS)
def test_a_model_that_computes_its_own_loss_is_refused_or_weighed(path: str) -> None:
    model, inputs = (
        WithLoss(),
        {"x": torch.randn(8, 6), "labels": torch.tensor([0, 0, 0, 1, 2, 3, 4, 1])},
    )
    flow = placed(model, path)
    with pytest.raises(BatchError, match="output 'loss'"):
        flow(**inputs, chunks=4)
    options = BatchOptions(weigh=lambda inputs, _: inputs["labels"] != 0)
    got = flow(**inputs, chunks=4, batch_options=options)
    torch.testing.assert_close(
        got["loss"].to("cpu"), copy.deepcopy(model).to("cpu")(**inputs)["loss"]
    )
    loss = flow.train_step(lambda output, _: output["loss"], batch_options=options)(
        inputs, chunks=4
    )
    torch.testing.assert_close(loss.float().to("cpu"), got["loss"].detach().to("cpu"))


# Batch dimensions.


@pytest.mark.covering
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "model", [Tagger, pytest.param(RecurrentTagger, marks=pytest.mark.exhaustive), Encoder]
)
@pytest.mark.parametrize("length", [6, 4])
def test_sequence_first_models_are_refused_and_the_error_names_the_declaration(
    model: type[nn.Module], path: str, length: int
) -> None:
    module, ids = model(), torch.randint(9, (length, 4))
    want = module(ids)
    flow = placed(module, path)
    with pytest.raises(
        BatchError,
        match=r"ids along dimension 0.*BatchOptions\(inputs=1\) gives the batch's results",
    ):
        flow(ids, chunks=2)
    torch.testing.assert_close(
        flow(ids, chunks=2, batch_options=BatchOptions(inputs=1)).to("cpu"), want
    )
    torch.testing.assert_close(
        flow(ids, chunks=4, batch_options=BatchOptions(inputs={"ids": 1})).to("cpu"), want
    )
    torch.testing.assert_close(flow(ids, chunks=1).to("cpu"), want)


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", PATHS)
def test_targets_of_sequence_first_models_are_cut_where_their_samples_lie(path: str) -> None:
    def last(y: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(y[-1], t)

    def every(y: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(y.flatten(0, 1), t.flatten())

    ids, options = torch.randint(9, (6, 4)), BatchOptions(inputs=1)
    check_step(Tagger(), last, ids, torch.randint(9, (4,)), options, path)
    check_step(Tagger(), every, ids, torch.randint(9, (6, 4)), options, path)
    check_step(Tagger(), every, ids[:4], torch.randint(9, (4, 4)), options, path)
    check_step(Tagger(), last, ids, torch.randint(9, (4,)), None, path, chunks=(1,))
    check_step(
        Tagger(),
        every,
        ids,
        torch.randint(9, (6, 4)),
        BatchOptions(inputs={"ids": 1}, target=1),
        path,
    )


def _ctc(y: Tensor, t: Tensor) -> Tensor:
    lengths = (
        torch.full((y.shape[1],), len(y), device=y.device),
        torch.full((len(t),), t.shape[1], device=y.device),
    )
    return F.ctc_loss(y.log_softmax(2), t, *lengths)


def _by_sample(y: Tensor, t: Tensor) -> Tensor:
    """Of a target (batch, length)."""
    return F.cross_entropy(y.flatten(0, 1), t.T.flatten())


def _by_step(y: Tensor, t: Tensor) -> Tensor:
    """Of a target (length, batch)."""
    return F.cross_entropy(y.flatten(0, 1), t.flatten())


DIMENSION_1 = [
    BatchOptions(inputs=1),
    BatchOptions(inputs={"*": 1}),
    BatchOptions(inputs={"ids": 1}),
]


@pytest.mark.covering
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "options", named({str(each): each for each in DIMENSION_1}, [str(DIMENSION_1[0])])
)
def test_a_target_is_cut_along_the_only_dimension_of_its_size(
    options: BatchOptions, path: str
) -> None:
    """A dimension that is declared of the inputs says nothing of the target."""
    check_step(
        Tagger(),
        _ctc,
        torch.randint(9, (7, 4)),
        torch.randint(1, 9, (4, 3)),
        options,
        path,
        chunks=(2,),
    )
    check_step(
        Tagger(),
        _by_sample,
        torch.randint(9, (6, 4)),
        torch.randint(9, (4, 6)),
        options,
        path,
        chunks=(2,),
    )
    check_step(
        Tagger(),
        _by_step,
        torch.randint(9, (6, 4)),
        torch.randint(9, (6, 4)),
        options,
        path,
        chunks=(2,),
    )


@pytest.mark.covering
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("options", DIMENSION_1, ids=str)
@pytest.mark.parametrize("loss_fn", [_ctc, _by_sample])
def test_a_wrong_guess_of_two_dimensions_is_refused_with_the_declaration(
    loss_fn: Any, options: BatchOptions, path: str
) -> None:
    """As many steps as samples: the target (batch, length) was taken for (length, batch)."""
    ids, target = torch.randint(9, (4, 4)), torch.randint(1, 9, (4, 4))
    with pytest.raises(
        (BatchError, StageError), match=r"cut the target along dimension 1.*target=0\)"
    ):
        placed(Tagger(), path).train_step(loss_fn, batch_options=options)(ids, target, chunks=2)
    declared = options.model_copy(update={"target": 0})
    check_step(Tagger(), _by_sample, ids, target, declared, path, chunks=(2,))


def test_a_later_target_is_cut_as_the_earlier_ones() -> None:
    """A batch with as many steps as samples was cut along its steps, without a comparison."""
    model = Tagger()
    step = placed(model).train_step(_by_sample, batch_options=BatchOptions(inputs=1))
    for length in (6, 4):
        ids, target = torch.randint(9, (length, 4)), torch.randint(9, (4, length))
        want, _ = unsplit(model, _by_sample, ids, target)
        torch.testing.assert_close(step(ids, target, chunks=2).to("cpu", want.dtype), want)


def test_a_stream_of_sequence_first_batches_needs_one_capture() -> None:
    flow = placed(Tagger().eval())
    batches = [torch.randint(9, (6, size)) for size in (4, 3, 6)]
    want = [flow(batch).to("cpu") for batch in batches]
    for got, expected in zip(
        flow.stream(batches, batch_options=BatchOptions(inputs=1)), want, strict=True
    ):
        torch.testing.assert_close(got.to("cpu"), expected)


# Lists of samples.


@pytest.mark.exhaustive
@pytest.mark.parametrize("frames", [2, 4])
def test_a_list_of_images_is_cut_by_its_items_once_declared(frames: int) -> None:
    model, images = Detector(), _images(frames)
    targets = [{"box": torch.rand(2)} for _ in images]
    options = BatchOptions(inputs={"images": "items", "targets": "items"})
    want = model(images, targets)
    flow = placed(model)
    with pytest.raises(
        BatchError, match=r"inputs=\{'images': 'items', 'targets': 'items'\}\) gives the batch's"
    ):
        flow.train_step(lambda loss, _: loss)((images, targets), chunks=2)
    for chunks in (1, 2, 4):
        got = flow.train_step(lambda loss, _: loss, batch_options=options)(
            (images, targets), chunks=chunks
        )
        torch.testing.assert_close(got.float().to("cpu"), want.detach())
        torch.testing.assert_close(
            flow(images, targets, chunks=chunks, batch_options=options).to("cpu"), want
        )
    check_step(model, lambda loss, _: loss, (images, targets), None, options)


@pytest.mark.parametrize("path", PATHS)
def test_lists_of_results_are_joined_by_their_items(path: str) -> None:
    model, images = Detector().eval(), _images()
    want = model(images)
    got = placed(model, path)(
        images, chunks=4, batch_options=BatchOptions(inputs={"images": "items"})
    )
    assert [sorted(one) for one in got] == [["box", "size"]] * 4
    torch.testing.assert_close([one["box"].to("cpu") for one in got], [one["box"] for one in want])


def test_a_target_that_is_a_list_of_samples_is_cut_by_its_items() -> None:
    class Boxes(Classifier):
        pass

    def loss_fn(y: Tensor, t: list[dict[str, Tensor]]) -> Tensor:
        return torch.stack(
            [
                (one - target["box"].to(one.device)).pow(2).mean()
                for one, target in zip(y, t, strict=True)
            ]
        ).mean()

    x, target = (
        torch.randn(4, 6),
        [{"box": torch.rand(5), "labels": [1] * place} for place in range(4)],
    )
    with pytest.raises(InputError, match="target='items'"):
        placed(Boxes()).train_step(loss_fn)(x, target, chunks=2)
    check_step(Boxes(), loss_fn, x, target, BatchOptions(target="items"))


def test_a_packed_sequence_is_refused_with_chunks_and_right_without() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.LSTM(4, 8)
            self.out = nn.Linear(8, 3)

        def forward(self, packed: Any) -> Tensor:
            return self.out(self.body(packed)[1][0][-1])

    model = Packed()
    packed = pack_padded_sequence(torch.randn(6, 4, 4), torch.tensor([6, 5, 3, 2]))
    want = model(packed)
    flow = placed(model)
    with pytest.raises(InputError, match=r"packed is a PackedSequence.*chunks=1"):
        flow(packed, chunks=2)
    torch.testing.assert_close(flow(packed, chunks=1).to("cpu"), want)


# What verification leaves alone, and what it costs.


class Noisy(nn.Module):
    """Dropout, batch statistics, random numbers and Python state."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.second = nn.Linear(8, 5)
        self.calls = 0
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(x))
        y = self.drop(self.norm(self.first(x)))
        return self.second(F.dropout(y + torch.randn_like(y), 0.3, self.training))


@pytest.mark.parametrize("path", PATHS)
def test_a_comparison_leaves_a_noisy_model_as_it_was(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Noisy(), torch.randn(8, 6)
    twin = copy.deepcopy(model)
    flow, unverified = placed(model, path), placed(twin, path)
    torch.manual_seed(1)
    got = flow(x, chunks=4)
    torch.manual_seed(1)
    want = unverified(x, chunks=4, batch_options=BatchOptions(verify=False))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close([*model.buffers()], [*twin.buffers()])
    assert (model.calls, model.seen) == (twin.calls, twin.seen)
    assert not gradients(model)


class Recorder:
    """A hook that writes to its own attributes."""

    def __init__(self) -> None:
        self.calls, self.sizes = 0, {"body": []}

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.calls += 1
        self.sizes["body"].append(len(output))


def test_user_hooks_leave_no_trace_of_a_comparison() -> None:
    model, seen, recorder = Classifier(), [], Recorder()
    model.body.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    model.body.register_forward_hook(recorder)
    placed(model)(torch.randn(8, 6), chunks=4)
    assert seen == recorder.sizes["body"] == [2, 2, 2, 2]
    assert recorder.calls == 4


def test_a_comparison_sees_what_user_hooks_change() -> None:
    model = Classifier()
    model.body.register_forward_hook(lambda module, args, output: output - output.mean(0))
    flow = placed(model)
    with pytest.raises(BatchError, match="the result of a batch"):
        flow(torch.randn(8, 6), chunks=4)


def test_hooks_on_gradients_do_not_prevent_a_comparison() -> None:
    """A comparison has no gradients."""
    model = Meeting()
    model.first.register_forward_hook(lambda module, args, output: output.retain_grad())
    flow = placed(model)
    with pytest.raises(BatchError, match="output 'attention'"):
        flow(torch.randn(8, 6), chunks=4)


def test_batches_of_one_kind_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    flow, runs = placed(Classifier()), []
    compared = PlacedModel.run_unsplit
    monkeypatch.setattr(
        PlacedModel, "run_unsplit", lambda self, call: runs.append(1) or compared(self, call)
    )
    for size in (8, 12, 9):
        flow(torch.randn(size, 6), chunks=3)
    assert len(runs) == 3
    flow(torch.randn(8, 6), chunks=3, batch_options=BatchOptions(inputs={"x": 0}, verify=False))
    flow(torch.randn(8, 2, 6), chunks=3)
    assert len(runs) == 6


@pytest.mark.parametrize("path", PATHS)
def test_verification_can_be_turned_off(path: str) -> None:
    model, x = VAE(), torch.rand(8, 6)
    loss = placed(model, path).train_step(elbo, batch_options=BatchOptions(verify=False))(
        x, x, chunks=4
    )
    want = torch.stack(
        [elbo(copy.deepcopy(model).to("cpu")(part), part) for part in x.split(2)]
    ).mean()
    torch.testing.assert_close(loss.float().to("cpu"), want.detach())


# What a step returns.


@pytest.mark.covering
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("chunks", [1, 3, 4])
def test_a_step_returns_joined_outputs_and_values(path: str, chunks: int) -> None:
    def loss_fn(y: Tensor, t: Tensor) -> tuple[Tensor, dict[str, Any]]:
        right = y.argmax(1) == t
        values = {
            "accuracy": right.float().mean(),
            "right": right.sum(),
            "right_each": right,
            "classes": y.shape[1],
        }
        return F.cross_entropy(y, t), values

    model, x, t = Classifier(), torch.randn(10, 6), torch.randint(5, (10,))
    logits = model(x)
    want, want_values = loss_fn(logits, t)
    step = placed(model, path).train_step(loss_fn)
    for _ in range(2):
        loss, values, outputs = step(x, t, chunks=chunks, outputs=True)
        torch.testing.assert_close(loss.float().to("cpu"), want.detach())
        torch.testing.assert_close(outputs.to("cpu"), logits.detach())
        assert values["classes"] == 5
        for name in ("accuracy", "right", "right_each"):
            torch.testing.assert_close(values[name].to("cpu"), want_values[name])
        loss, values = step(x, t, chunks=chunks)
        torch.testing.assert_close(values["right"].to("cpu"), want_values["right"])


def test_a_value_that_micro_batches_do_not_give_is_refused_by_name() -> None:
    def loss_fn(y: Tensor, t: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return F.mse_loss(y, t), {"rmse": F.mse_loss(y, t).sqrt()}

    model, x, t = Classifier(), torch.randn(8, 6), torch.randn(8, 5)
    with pytest.raises(BatchError, match=r"the value 'rmse' .*'list'"):
        placed(model).train_step(loss_fn)(x, t, chunks=2)
    step = placed(model).train_step(loss_fn, batch_options=BatchOptions(outputs={"rmse": "list"}))
    _, values = step(x, t, chunks=2)
    assert len(values["rmse"]) == 2


def test_a_loss_that_gives_another_tuple_is_refused() -> None:
    with pytest.raises(InputError, match=r"loss_fn returned a tuple of 3.*\(loss, \{"):
        placed(Classifier()).train_step(lambda y, t: (y.mean(), y, y))(torch.randn(4, 6))


# Wrong declarations.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (BatchOptions(inputs={"y": 1}), r"names 'y', which is not an input \(inputs: x\)"),
        (BatchOptions(inputs={"x": 2}), r"dimension 2 of 'x' is the batch; it has shape \(8, 6\)"),
        (
            BatchOptions(inputs={"x": "items"}),
            r"items of 'x' are samples; it is a tensor of shape \(8, 6\)",
        ),
        ({"inputs": 1}, "batch_options is a dict"),
    ],
)
def test_declarations_that_do_not_fit_are_refused_by_name(options: Any, message: str) -> None:
    flow = placed(Classifier())
    with pytest.raises(InputError, match=message):
        flow(torch.randn(8, 6), chunks=2, batch_options=options)


def test_inputs_of_unlike_batches_are_refused_where_both_are_declared() -> None:
    flow = placed(Towers())
    with pytest.raises(InputError, match=r"'y' has shape \(8, 5\), 8 along dimension 0.*6 samples"):
        flow(
            torch.randn(6, 6),
            torch.randn(8, 5),
            chunks=2,
            batch_options=BatchOptions(inputs={"x": 0, "y": 0}),
        )


# Through profile, placement and JSON.


def test_a_placement_carries_the_declaration_to_its_flow() -> None:
    model, ids = Tagger().eval(), torch.randint(9, (6, 4))
    options = BatchOptions(inputs={"ids": 1}, outputs=1)
    found = placer.profile(
        model,
        ids,
        DEVICES,
        training=False,
        progress=False,
        cache=False,
        repeats=1,
        batch_options=options,
    )
    assert found.batch_size == 4 and found.batch_options == options
    again = placer.Profile.model_validate_json(found.to_json())
    request = placer.PlacementRequest(
        profile=again, constraints=placer.Constraints(min_devices=2), chunks=2
    )
    placement = placer.Placement.model_validate_json(placer.solve(request).to_json())
    assert placement.batch_options == options
    want = model(ids)
    flow = placer.DataFlow(model, DEVICES)
    flow.update_flow(placement)
    # in the placement's two micro-batches
    torch.testing.assert_close(flow(ids).to("cpu"), want)
    flow.undo()
    assert flow.batch_options == BatchOptions()


def test_other_batch_sizes_are_measured_along_the_declared_dimension() -> None:
    profiles = placer.profile(
        Tagger(),
        torch.randint(9, (6, 4)),
        DEVICES[:1],
        progress=False,
        cache=False,
        repeats=1,
        batch_sizes=(2, 8),
        batch_options=BatchOptions(inputs=1),
    )
    assert [one.batch_size for one in profiles] == [2, 8]
    sizes = [{edge.bytes for edge in one.edges} for one in profiles]
    assert {4 * size for size in sizes[0]} == sizes[1]


def test_a_loss_may_select_results_by_whether_they_require_gradients() -> None:
    """Without a graph, there would be nothing to add up."""

    def loss_fn(output: Tensor, _: Any) -> Tensor:
        return sum(part.pow(2).mean() for part in (output,) if part.requires_grad)

    torch.manual_seed(0)
    model, x = Classifier(), torch.randn(8, 6)
    expected = loss_fn(model(x), None).detach()
    loss = placed(model).train_step(loss_fn)(x, chunks=2)
    torch.testing.assert_close(loss.cpu(), expected)
