"""Models in float64 with a batch, its target and a loss, for the tests of placer.distributed.

The same in every process. Functions without arguments, so that they travel to other processes by
name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from model_list import torchvision_models
from small_models import Skips, TiedTokens, tokens_loss
from torch import Tensor, nn
from torch.nn import functional
from weight_kinds import WIDTH, Scaled

from placer.zoo import gpt, resnet18, unet

Case = tuple[nn.Module, Any, Any, Callable[[Any, Any], Tensor]]


def chain() -> Case:
    """Layers that write in place to what they receive."""
    model = nn.Sequential(
        *(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)) for _ in range(8))
    )
    return (
        model.double(),
        torch.randn(8, 6).double(),
        torch.randn(8, 6).double(),
        functional.mse_loss,
    )


def replicated_chain() -> Case:
    model, *rest = chain()
    return nn.parallel.DistributedDataParallel(model), *rest


def pairs() -> Case:
    """A loss over pairs of samples, which no part of a batch has all of."""
    model, inputs, target, _ = chain()
    return model, inputs, target, _in_batch_negatives


def _in_batch_negatives(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output @ target.T, torch.arange(len(output)))


def padded() -> Case:
    """Labels of unlike numbers a micro-batch, of two samples each; the first has none."""
    model, inputs, _, _ = chain()
    classes = model(inputs).shape[1]
    labels = torch.arange(len(inputs)) % classes
    labels[:2] = labels[5] = -100
    return (
        model,
        inputs,
        labels,
        nn.CrossEntropyLoss(weight=torch.linspace(0.5, 3.0, classes, dtype=torch.float64)),
    )


def strided() -> Case:
    """Neither the batch nor the result is contiguous."""
    model = nn.Sequential(
        *(nn.Linear(6, 6) for _ in range(7)), nn.Unflatten(1, (2, 3)), _Transpose()
    )
    return (
        model.double(),
        torch.randn(8, 12).double()[:, ::2],
        torch.randn(8, 3, 2).double(),
        functional.mse_loss,
    )


class _Transpose(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def skips() -> Case:
    return (
        Skips().double(),
        torch.randn(8, 5).double(),
        torch.randn(8, 5).double(),
        functional.mse_loss,
    )


def small_resnet18() -> Case:
    images = torch.randn(16, 3, 32, 32).double()
    return (
        resnet18(num_classes=10).double(),
        images,
        torch.randint(10, (16,)),
        functional.cross_entropy,
    )


def small_unet() -> Case:
    images = torch.randn(8, 3, 16, 16).double()
    return unet(width=4).double(), images, torch.randint(2, (8, 16, 16)), functional.cross_entropy


def tied_gpt() -> Case:
    model = gpt(layers=4, width=16, heads=2, context=8, vocabulary=11, tied=True).double()
    return model, torch.randint(11, (8, 8)), torch.randint(11, (8, 8)), tokens_loss


def tied_tokens() -> Case:
    return TiedTokens().double(), torch.randint(7, (8, 3)), torch.randint(7, (8, 3)), tokens_loss


class TiedRow(nn.Module):
    """Five layers; the last one's weight is the first one's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 10)
        self.first, self.second = nn.Linear(10, 10), nn.Linear(10, 10)
        self.norm, self.head = nn.LayerNorm(10), nn.Linear(10, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(self.embedding(tokens))))
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def tied_row() -> Case:
    return TiedRow().double(), torch.randint(7, (8, 3)), torch.randint(7, (8, 3)), tokens_loss


def longer_tied_row() -> Case:
    """A batch that three replicas may divide."""
    return TiedRow().double(), torch.randint(7, (12, 3)), torch.randint(7, (12, 3)), tokens_loss


TIED_ROW = {
    "embedding": "cpu:0", "first": "cpu:1", "second": "cpu:2", "norm": "cpu:3", "head": "cpu:3",
}  # fmt: skip
"""Its layers on four devices."""


def frozen_beginning() -> Case:
    model, inputs, target, loss_fn = chain()
    for parameter in model[:4].parameters():
        parameter.requires_grad_(False)
    return model, inputs, target, loss_fn


class Table(nn.Module):
    """Three layers that read one plain tensor, to which forward writes if ``writes``."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.writes = writes
        self.front, self.middle, self.back = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.table = torch.linspace(0.5, 2.0, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x) * self.table
        x = self.middle(x) + self.table
        if self.writes:
            self.table.add_(1.0)
        return self.back(x) - self.table  # type: ignore[no-any-return]


def plain_table() -> Case:
    return (
        Table(writes=False).double(),
        torch.randn(8, 6).double(),
        torch.randn(8, 6).double(),
        functional.mse_loss,
    )


def written_table() -> Case:
    return (
        Table(writes=True).double(),
        torch.randn(8, 6).double(),
        torch.randn(8, 6).double(),
        functional.mse_loss,
    )


def frozen_tied_tokens() -> Case:
    model, inputs, target, loss_fn = tied_tokens()
    model.embedding.weight.requires_grad_(False)
    return model, inputs, target, loss_fn


class TwoOutputs(nn.Module):
    """The loss uses one of its outputs: nothing flows back from the other, nor through the layers
    that make it."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(6, 6)
        self.aside = nn.Linear(6, 6)
        self.back = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        front = torch.tanh(self.front(x))
        return self.back(front), self.aside(front)


def two_outputs() -> Case:
    batch = torch.randn(8, 6).double(), torch.randn(8, 6).double()
    return TwoOutputs().double(), *batch, lambda out, goal: functional.mse_loss(out[0], goal)


class Masked(nn.Module):
    """Whole numbers, a mask, a size, a buffer and a complex number are made at the front and read
    at the back."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 2, 6))
        self.front = nn.Linear(6, 6)
        self.middle = nn.Linear(6, 6)
        self.back = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        front = self.front(x * self.scale)
        mask, order, wave = front > 0, front.detach().argsort(dim=1), torch.fft.rfft(front)
        middle = self.middle(front)
        back = self.back(middle.masked_fill(mask, 0.5).gather(1, order))
        return back * self.scale + torch.fft.irfft(wave * x.size(0), n=6)


def masked() -> Case:
    return (
        Masked().double(),
        torch.randn(8, 6).double(),
        torch.randn(8, 6).double(),
        functional.mse_loss,
    )


class Shift(nn.Module):
    """Adds a bias; its backward pass does not need what it read."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.linear(x * y)


class Branches(nn.Module):
    """Two branches that take turns; the second writes in place to what the first has read."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.left = Shift()
        self.right = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6))
        self.join = Product()

    def forward(self, x: Tensor) -> Tensor:
        stem = self.stem(x)
        left = self.left(stem)
        return self.join(left, self.right(stem))


def branches() -> Case:
    return (
        Branches().double(),
        torch.randn(8, 6).double(),
        torch.randn(8, 6).double(),
        functional.mse_loss,
    )


class Unbatched(nn.Module):
    """A second input without a batch, as an attention mask is."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(6, 6)
        self.back = nn.Linear(6, 6)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return self.back(torch.tanh(self.front(x)) @ weights)


def unbatched() -> Case:
    inputs = (torch.randn(8, 6).double(), torch.randn(6, 6).double())
    return Unbatched().double(), inputs, torch.randn(8, 6).double(), functional.mse_loss


def bert() -> Case:
    """Transformers' own model, with keyword arguments and its own object as result."""
    # transformers imports torchvision, and fails where its compiled operators are missing
    torchvision_models()
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=16,
    )
    mask = torch.ones(4, 8, dtype=torch.long)
    mask[1, 5:] = 0
    inputs = {"input_ids": torch.randint(30, (4, 8)), "attention_mask": mask}
    model = BertForSequenceClassification(config).double().train()
    return (
        model,
        inputs,
        torch.randint(2, (4,)),
        lambda out, goal: functional.cross_entropy(out.logits, goal),
    )


def auxiliary() -> Case:
    """Running statistics, and a weight that training alone uses first."""
    return (
        _Auxiliary().double(),
        torch.randn(8, 4).double(),
        torch.randn(8, 3).double(),
        _auxiliary_loss,
    )


class _Auxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.aux, self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.body.weight = self.aux.weight

    def forward(self, x: Tensor) -> Any:
        y = self.norm(self.stem(x)).tanh()
        aside = self.aux(y) if self.training else None
        result = self.head(self.body(y).tanh())
        return (result, aside) if self.training else result


def _auxiliary_loss(output: Any, target: Tensor) -> Tensor:
    result, aside = output
    return functional.mse_loss(result, target) + aside.pow(2).mean()


class _SharedWrapper(nn.Module):
    """Layers of which the first and the last have one frozen weight of whole numbers and scales,
    and a dense one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.own, self.last = (
            nn.Linear(WIDTH, WIDTH).double() for _ in range(4)
        )
        for layer in (self.first, self.own):
            layer.weight = nn.Parameter(Scaled.of(layer.weight.detach()), requires_grad=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.own(self.middle(self.first(x).relu()).relu()).relu())
        return result


def quantised() -> Case:
    inputs, target = torch.randn(8, WIDTH).double(), torch.randn(8, WIDTH).double()
    return _SharedWrapper(), inputs, target, functional.mse_loss
