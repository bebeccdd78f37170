"""Models that read a plain tensor in several layers: one that is neither a parameter nor a buffer
nor an input."""

from __future__ import annotations

import types
from collections import namedtuple
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

DTYPE = torch.float64
Pair = namedtuple("Pair", "table scale")

TABLE = torch.rand(6, dtype=DTYPE)
ITEMS = [torch.rand(6, dtype=DTYPE)]
BY_NAME = {"table": torch.rand(6, dtype=DTYPE)}
PAIR = Pair(torch.rand(6, dtype=DTYPE), 2.0)


class Block(nn.Module):
    """A layer that adds a table."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """What the next block is given."""
        return torch.tanh(self.linear(x) + table)


class Net(nn.Module):
    """Three blocks that read one plain tensor, which lies where ``where`` says, and code that uses
    it as ``use``."""

    on_class = torch.rand(6, dtype=DTYPE)
    in_dict_of_class: ClassVar = {"table": torch.rand(6, dtype=DTYPE)}

    def __init__(self, where: str, use: str) -> None:
        super().__init__()
        self.where, self.use = where, use
        self.a, self.b, self.c = Block(), Block(), Block()
        self.own = torch.rand(6, dtype=DTYPE)
        self.items = [torch.rand(6, dtype=DTYPE)]
        self.nested = {"tables": [(torch.rand(6, dtype=DTYPE),)]}
        self.settings = types.SimpleNamespace(table=torch.rand(6, dtype=DTYPE))
        closed_over = torch.rand(6, dtype=DTYPE)
        self.closure = lambda: closed_over
        self.double()

    def table(self) -> Tensor:
        """The plain tensor."""
        places: dict[str, Callable[[], Tensor]] = {
            "attribute": lambda: self.own,
            "list": lambda: self.items[0],
            "nest": lambda: self.nested["tables"][0][0],
            "settings": lambda: self.settings.table,
            "closure": lambda: self.closure(),
            "class": lambda: self.on_class,
            "dict of the class": lambda: self.in_dict_of_class["table"],
            "variable": lambda: TABLE,
            "list in a variable": lambda: ITEMS[0],
            "dict in a variable": lambda: BY_NAME["table"],
            "named tuple in a variable": lambda: PAIR.table,
        }
        return places[self.where]()

    def forward(self, x: Tensor) -> Tensor:
        """Three blocks, and what is done with the table around them."""
        if "hooks" in self.use:
            # torch.export refuses a number that depends on values
            x = x + float(x.detach().sum() * 0)
        if "before" in self.use:
            self.table().mul_(0.5)
        x = self.a(x, self.table())
        if "item" in self.use:
            self.table()[2:4] = 0.25
        if "between" in self.use:
            self.table().copy_(x.detach().mean(0))
        x = self.c(self.b(x, self.table()), self.table())
        if "after" in self.use:
            self.table().add_(1.0)
        return x


WHERE = [
    "attribute",
    "list",
    "nest",
    "settings",
    "closure",
    "class",
    "dict of the class",
    "variable",
    "list in a variable",
    "dict in a variable",
    "named tuple in a variable",
]
INPUTS = [
    torch.randn(4, 6, dtype=DTYPE, generator=torch.Generator().manual_seed(seed))
    for seed in range(4)
]


def fresh(where: str, use: str, training: bool = False) -> Net:
    """The model, with the same values each time."""
    torch.manual_seed(0)
    for shared in (
        TABLE,
        ITEMS[0],
        BY_NAME["table"],
        PAIR.table,
        Net.on_class,
        Net.in_dict_of_class["table"],
    ):
        shared.copy_(torch.rand(6, dtype=DTYPE))
    return Net(where, use).train(training)


USES = ["read", "write before", "write item", "write between", "write after"]
