"""A courier that forgets one of the tensors that it is to bring: whoever reads it must notice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from placer.devices import Courier


class Forgetful:
    """In the place of ``Courier.send_all``: counts what is sent, and forgets one of it.

    Attributes:
        sent: how many tensors were to be sent.
        forgotten: which of them is not; -1 for none.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._send_all = Courier.send_all
        self.sent, self.forgotten = 0, -1
        monkeypatch.setattr(Courier, "send_all", lambda courier, *rest: self._send(courier, *rest))

    def _send(
        self,
        courier: Courier,
        sources: Sequence[Tensor],
        ready: Any,
        targets: Sequence[Tensor],
        free: Any,
        channel: str,
        label: Any = None,
        adds: Sequence[bool] = (),
    ) -> Any:
        first, self.sent = self.sent, self.sent + len(sources)
        kept = [index for index in range(len(sources)) if first + index != self.forgotten]
        for index in set(range(len(sources))) - set(kept):
            # else the value of an earlier run may lie there
            targets[index].fill_(torch.nan)
        if not kept:
            return None
        some, others, sums = (
            [row[index] for index in kept] if row else [] for row in (sources, targets, adds)
        )
        return self._send_all(courier, some, ready, others, free, channel, label, sums)
