"""Models in float64 for placer.distributed of which a part has no gradient, or state that stages
could disagree about.

Functions without arguments, as in ``ranked_models``, so that they travel to other processes by
name."""

from __future__ import annotations

from typing import Any

import torch
from ranked_models import Case
from torch import Tensor, nn
from torch.nn import functional


class Linears(nn.Module):
    """Four linear layers, which ``forward`` puts together."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(6, 6)
        self.aside = nn.Linear(6, 6)
        self.middle = nn.Linear(6, 6)
        self.back = nn.Linear(6, 6)


def _case(model: nn.Module, loss_fn: Any = functional.mse_loss) -> Case:
    return model.double(), torch.randn(8, 6).double(), torch.randn(8, 6).double(), loss_fn


def _of_first(output: Any, target: Tensor) -> Tensor:
    return functional.mse_loss(output[0], target)


class PassedBy(Linears):
    """What is made aside goes by other layers to the results."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        front, aside = torch.tanh(self.front(x)), self.aside(x)
        return self.back(torch.tanh(self.middle(front))), aside


def passed_by() -> Case:
    """The loss does not depend on one of two results."""
    return _case(PassedBy(), _of_first)


def now_and_then() -> Case:
    """The loss depends on the second result in batches with a large target alone."""

    def loss(output: Any, target: Tensor) -> Tensor:
        error = functional.mse_loss(output[0], target)
        return error + output[1].square().mean() if target.max() > 100 else error

    return _case(PassedBy(), loss)


class Detached(nn.Module):
    def forward(self, x: Tensor, aside: Tensor) -> Tensor:
        return x + aside.detach()


class DetachedLate(Linears):
    """A layer takes a value without its gradient, stages after the one that made it."""

    def __init__(self) -> None:
        super().__init__()
        self.join = Detached()

    def forward(self, x: Tensor) -> Tensor:
        front, aside = torch.tanh(self.front(x)), self.aside(x)
        return self.back(self.join(torch.tanh(self.middle(front)), aside))


def detached_late() -> Case:
    return _case(DetachedLate())


class Steep(Linears):
    """A result whose gradient, times zero, is no number."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        front = torch.tanh(self.front(x))
        steep = torch.sqrt(front - front)
        return self.back(torch.tanh(self.middle(self.aside(front)))), steep


def steep() -> Case:
    return _case(Steep(), _of_first)


class TiedAside(Linears):
    """Two layers share a weight, and only a result that the loss leaves out is made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.back.weight = self.aside.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        front = torch.tanh(self.front(x))
        aside = self.aside(front)
        return self.middle(front), self.back(aside)


def tied_aside() -> Case:
    return _case(TiedAside(), _of_first)


class WrittenIn(Linears):
    """A value is written into another in place, which goes on to the result."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        front, aside = torch.tanh(self.front(x)), self.aside(x)
        middle = torch.tanh(self.middle(front))
        whole = middle * 1
        whole[:, :3].add_(aside[:, 3:])
        return self.back(whole), front


def written_in() -> Case:
    return _case(WrittenIn(), _of_first)


class WrittenAndDetached(Linears):
    """A tensor written in place is read without its gradient, in stages after its producer."""

    def __init__(self) -> None:
        super().__init__()
        self.join = Detached()

    def forward(self, x: Tensor) -> Tensor:
        front, aside = torch.tanh(self.front(x)), self.aside(x)
        whole = aside + 0
        whole.add_(front)
        return self.back(self.join(torch.tanh(self.middle(front)), whole))


def written_and_detached() -> Case:
    return _case(WrittenAndDetached())


class Counted(Linears):
    """Numbers that are taken from tensors cross: another one in every micro-batch."""

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        front = self.front(x)
        count = (front > 0).sum().item()
        return self.back(torch.tanh(self.middle(torch.tanh(self.aside(front))))) * count, count


def counted() -> Case:
    return _case(
        Counted(),
        lambda output, target: functional.mse_loss(output[0], target) * (1 + 0.1 * output[1]),
    )


class NormalisedTwice(nn.Module):
    """One normalisation is called twice, with a layer between."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.back = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.back(self.norm(self.front(x))))


def normalised_twice() -> Case:
    return _case(NormalisedTwice())


class Tempered(nn.Module):
    """A buffer changes with every micro-batch, and backward passes read it: of its own layer, and
    of the one behind."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(6, 6)
        self.cool = _Cool()
        self.back = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.back(self.cool(self.front(x)))) / self.cool.heat


class _Cool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("heat", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        self.heat *= 0.9
        return torch.tanh(x / self.heat)


def tempered() -> Case:
    return _case(Tempered())


class Shifted(nn.Module):
    """Adds a buffer that is not saved; both layers use it."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(6, 6)
        self.back = nn.Linear(6, 6)
        self.register_buffer("shift", torch.linspace(-1, 1, 6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(torch.tanh(self.front(x) + self.shift)) * self.shift


def shifted() -> Case:
    return _case(Shifted())


class Bare(nn.Module):
    """A layer in the middle has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(6, 6)
        self.middle = nn.Tanh()
        self.back = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.middle(self.front(x)))


def bare() -> Case:
    return _case(Bare())


class Waves(nn.Module):
    """A parameter of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(6, 6, dtype=torch.float64)
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex128))
        self.back = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(torch.fft.irfft(torch.fft.rfft(self.front(x)) * self.weight, n=6))


def waves() -> Case:
    return Waves(), torch.randn(8, 6).double(), torch.randn(8, 6).double(), functional.mse_loss


class Mixed(nn.Module):
    """An input and a result have no batch, but as many rows as a micro-batch has samples."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(6, 6)
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.back = nn.Linear(6, 6)

    def forward(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        front = torch.tanh(self.front(x))
        return self.back(front + (self.weight @ table[:3]).sum()), self.weight * front.mean()


def mixed() -> Case:
    inputs = (torch.randn(8, 6).double(), torch.randn(4, 4).double())
    return Mixed().double(), inputs, torch.randn(8, 6).double(), _of_first


class Windowed(Linears):
    """Beside its result it returns what is made of no input, as caches return the size of their
    window, and sizes."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
        window, weight = torch.arange(4096, 4098), self.front.weight * 2
        return (
            self.back(torch.tanh(self.front(x))),
            window,
            weight,
            (x.shape[0], 2 * x.numel(), 4096),
        )


def windowed() -> Case:
    return _case(Windowed(), _of_first)


class Positioned(Linears):
    """Adds what a row of numbers says, which is that of all samples."""

    def forward(self, x: Tensor, row: Tensor) -> Tensor:
        return self.back(torch.tanh(self.front(x) + row))


def positioned() -> Case:
    model, x, target, loss_fn = _case(Positioned())
    return model, (x, torch.randn(1, 6).double()), target, loss_fn
