"""What a trace holds of a pass."""

from __future__ import annotations

from typing import NamedTuple

import torch

from placer.devices import Mark
from placer.schedule import Phase


class Issued(NamedTuple):
    """An issued pass of a stage, between two marks in its device's lane."""

    device: torch.device
    stage: int
    phase: Phase
    micro_batch: int
    began: Mark
    ended: Mark
