"""What the generations of one flow find out about its model, and how they ran."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from placer.executor.generation.model_state import ModelState
from placer.executor.generation.prompts import Prompts


@dataclass(frozen=True)
class GenerationReport:
    """How the tokens of ``model.generate`` inside ``flow.applied()`` were computed.

    Attributes:
        recorded: calls with one token per sequence that replayed a recorded pass.
        hooked: such calls that ran through hooks, among them two before each recording.
        stages: devices of the pieces of the latest recorded pass, in order.
        capacity: tokens that the latest static cache has room for; 0 without one.
        compiled: by piece of the latest pass that was compiled, its device and what it gained.
        not_compiled_because: by piece that is not, though it was asked for, its device and why.
        not_recorded_because: why the latest such call could not be recorded; empty if it was, or
            will be when its kind comes again.
        recorded_prompts: prompts that replayed a recorded pass.
        prompt_not_recorded_because: why the latest prompt whose shape came again could not be
            recorded; empty if it was, or will be.
    """

    recorded: int = 0
    hooked: int = 0
    stages: tuple[str, ...] = ()
    capacity: int = 0
    compiled: tuple[str, ...] = ()
    not_compiled_because: tuple[str, ...] = ()
    not_recorded_because: str = ""
    recorded_prompts: int = 0
    prompt_not_recorded_because: str = ""


@dataclass
class Findings:
    """What all generations of a flow share; they write to it in their turn only.

    Attributes:
        report: how tokens were computed.
        version: grows whenever recordings are outdated.
        refused: by kind of call, why it cannot be recorded.
        verified: the kinds of calls whose static cache gives the model's result.
        homes: by kind of cache, the devices of the layers that fill it.
        prompts: the kinds that came lately.
        state: of the model, which recordings rely on; None without recordings.
        is_unsteady: whether attributes of the model change in every pass.
    """

    report: GenerationReport = field(default_factory=GenerationReport)
    version: int = 0
    refused: dict[Hashable, str] = field(default_factory=dict)
    verified: set[Hashable] = field(default_factory=set)
    homes: dict[Hashable, Sequence[torch.device]] = field(default_factory=dict)
    prompts: Prompts = field(default_factory=Prompts)
    state: ModelState | None = None
    is_unsteady: bool = False

    def outdate(self) -> None:
        """Forget the model's state; every generation then drops its recordings."""
        self.version += 1
        self.refused.clear()
        self.verified.clear()
        self.homes.clear()
        self.prompts.clear()
        self.state = None

    def note(self, recorded: int = 0, hooked: int = 0, why: str = "", **latest: Any) -> None:
        """Count calls with one token per sequence in the report.

        Args:
            recorded: calls that replayed a pass.
            hooked: calls through hooks.
            why: a call could not be recorded.
            latest: further attributes that change.
        """
        self.report = replace(
            self.report,
            recorded=self.report.recorded + recorded,
            hooked=self.report.hooked + hooked,
            not_recorded_because=why,
            **latest,
        )

    def note_prompt(self, recorded: int = 0, why: str = "") -> None:
        """Count prompts whose shape came before in the report.

        Args:
            recorded: prompts that replayed a pass.
            why: a prompt could not be recorded.
        """
        self.report = replace(
            self.report,
            recorded_prompts=self.report.recorded_prompts + recorded,
            prompt_not_recorded_because=why,
        )
