"""Models whose state, calls or operations make splitting hard."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class CalledTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.between, self.relu = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.shared(self.between(self.relu(self.shared(x)))))


class NormCalledTwice(nn.Module):
    """Running statistics that two calls change one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(self.norm(x)))


class TiedLinears(nn.Module):
    """One weight in three modules, transposed in one of them, and a tied bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 4, bias=False),
        )
        self.second.weight = self.first.weight
        self.second.bias = self.first.bias
        self.third.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return functional.linear(y, self.first.weight.t())


class OnTheRoot(nn.Module):
    """Parameters and buffers of the root itself, used before, between and after its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 1.5))
        self.table = nn.Parameter(torch.randn(6, 4))
        self.register_buffer("shift", torch.ones(4))
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0]), persistent=False)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = (x + self.table) * self.scale
        x = self.first(x) * self.mask + self.shift
        return self.second(x) * self.scale + self.table[0]


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).requires_grad_(
            False
        )
        self.head = nn.Linear(4, 3)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


class Counter(nn.Module):
    """A buffer that the model changes in place, one that it replaces' data of, and one that only
    reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.first(x)
        with torch.no_grad():
            self.average.mul_(0.9).add_(y.detach().mean(dim=0), alpha=0.1)
        return self.second(y - self.average) * self.calls


class SharedBuffer(nn.Module):
    """A buffer that several layers read and one changes."""

    class Reader(nn.Module):
        def __init__(self, table: Tensor) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("table", table)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + self.table

    def __init__(self) -> None:
        super().__init__()
        table = torch.ones(4, dtype=torch.float64)
        self.readers = nn.ModuleList(self.Reader(table) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for reader in self.readers:
            x = reader(x)
        return x


class MixedDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.narrow, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.narrow.bfloat16()(self.first(x).bfloat16())
        return self.last(y.double())


class AutocastInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.second(y)
            with torch.autocast("cpu", enabled=False):
                y = torch.tanh(y.float())
            z = y @ y.t()
        return self.third(y) + z.float().mean()


class NoGradInside(nn.Module):
    """A no_grad region over several layers, with a grad region inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.no_grad():
            target = self.second(y)
            with torch.enable_grad():
                kept = self.third(target)
            target = torch.tanh(self.last(target))
        return self.last(y) * target + kept


class DetachInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.third(self.second(y.detach()) + y)


class InPlace(nn.Module):
    """Values overwritten after others have read them, and read after they were overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x) * 1.0
        before = y + 0.0
        self.relu(y)
        z = self.second(y)
        z = z * 1.0
        z += before
        z[:, 0] = y[:, 1]
        return self.third(z) + y


class WrittenThroughViews(nn.Module):
    """One layer writes, through views, to what another layer made; a third one reads the whole."""

    class Writer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, table: Tensor, row: int, x: Tensor) -> None:
            table[row].copy_(self.linear(x))
            table.narrow(1, 0, 2).mul_(0.5)

    def __init__(self) -> None:
        super().__init__()
        self.make, self.writer, self.other, self.last = (
            nn.Linear(4, 4),
            self.Writer(),
            self.Writer(),
            nn.Linear(4, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        table = self.make(x) * 1.0
        self.writer(table, 1, x[0])
        middle = table.clone()
        self.other(table, 2, x[1])
        return self.last(table) + middle


class Swaps(nn.Module):
    """Outputs chunked, swapped and stacked over modules (ShuffleNet's pattern), with an in-place
    list of results."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, dim=1)
        results = []
        for layer in self.layers:
            left, right = right, layer(left)
            results.insert(0, right)
        return torch.stack(results, dim=1).flatten(1)


class FunctionalDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(self.first(x), 0.5, self.training)
        x = x + torch.rand_like(x)
        return functional.dropout(self.second(x), 0.5, self.training)


class NoModules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class UnusedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def _normed(norm: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(norm(nn.Linear(4, 4)), nn.Tanh(), norm(nn.Linear(4, 2)))


class Towers(nn.Module):
    """Parts of an input, and of a parameter, each for a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 4), nn.Linear(2, 4)
        self.table = nn.Parameter(torch.randn(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        one, other = x.chunk(2, 1)
        scale, shift = self.table.split(4, 1)
        return self.first(one) * scale[0] + self.second(other) * shift[1]


class Draws(nn.Module):
    """A variational autoencoder: what it draws is checked by torch.distributions, unless a graph is
    made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.first(x).chunk(2, 1)
        drawn = torch.distributions.Normal(mean, spread.exp())
        known = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        return self.last(drawn.rsample()), torch.distributions.kl_divergence(drawn, known).sum(1)


AWKWARD: dict[str, Callable[[], nn.Module]] = {
    "called_twice": CalledTwice,
    "norm_called_twice": NormCalledTwice,
    "tied_linears": TiedLinears,
    "on_the_root": OnTheRoot,
    "frozen": Frozen,
    "counter": Counter,
    "shared_buffer": SharedBuffer,
    "no_grad_inside": NoGradInside,
    "detach_inside": DetachInside,
    "in_place": InPlace,
    "written_through_views": WrittenThroughViews,
    "swaps": Swaps,
    "functional_dropout": FunctionalDropout,
    "unused_layer": UnusedLayer,
    "towers": Towers,
    "draws": Draws,
    "old_weight_norm": _normed(nn.utils.weight_norm),
    "old_spectral_norm": _normed(nn.utils.spectral_norm),
    "weight_norm": _normed(nn.utils.parametrizations.weight_norm),
    "spectral_norm": _normed(nn.utils.parametrizations.spectral_norm),
    "instance_norm": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)),
        nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
        nn.Flatten(),
    ),
}


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 4))
            for _ in range(3)
        )
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x
