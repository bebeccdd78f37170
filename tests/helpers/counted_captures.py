"""How often a test has a model captured."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from placer.executor import model_captures


def count_captures(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """From now on collects the model of each capture, until the test is over."""
    made: list[nn.Module] = []
    export = model_captures.export

    def counted(module: nn.Module, *given: Any) -> Any:
        made.append(module)
        return export(module, *given)

    monkeypatch.setattr(model_captures, "export", counted)
    return made
