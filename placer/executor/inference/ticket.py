"""A batch of a stream until its result is handed out: where it is, or what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from placer.errors import StageError
from placer.executor.inference.stream_engine import Passage
from placer.executor.inference.stream_pipeline import InferencePipeline
from placer.executor.stage_errors import StageMemoryError


@dataclass(eq=False)
class Ticket:
    """A batch that was taken from the source and whose result was not handed out.

    Attributes:
        pipeline: the stages that it goes through; None once its result, or its error, is known.
        passage: where it is there.
        result: what the model returned for it, without a pipeline.
        is_flat: whether its result is handed out flattened.
        error: what is raised when its turn comes.
    """

    pipeline: InferencePipeline | None = None
    passage: Passage | None = None
    result: Any = None
    is_flat: bool = False
    error: Exception | None = None

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to issue."""
        if self.error is not None or self.pipeline is None or self.passage is None:
            return True
        return self.pipeline.engine.is_through(self.passage)

    def advance(self) -> None:
        """Issue its next stage; what fails is the ticket's error."""
        assert self.pipeline is not None and self.passage is not None
        try:
            self.pipeline.advance(self.passage)
        except Exception as error:
            # A stage's error names the layer; any other one comes from between the stages.
            self.error = (
                error if isinstance(error, StageError) else _outside_layers(error, self.passage)
            )

    def drop(self) -> None:
        """Forget the batch. An error's calls may hold the ticket, which then holds nothing."""
        if self.pipeline is not None and self.passage is not None:
            self.pipeline.engine.drop(self.passage)
        self.pipeline = self.passage = self.result = self.error = None


def _outside_layers(error: Exception, passage: Passage) -> StageError:
    text = f"batch {passage.number} failed between segments, before segment {passage.stage}"
    kind = StageMemoryError if isinstance(error, torch.OutOfMemoryError) else StageError
    failure = kind(f"{text}: {type(error).__name__}: {error}", "", None, passage.number)
    failure.__cause__ = error
    return failure
