"""The library's stage, whose passes say where they fail: the library hides what a layer raised behind its own error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.pipelining import PipelineStage

from placer.distributed.stage import StageModule
from placer.executor.faults import Place, raise_explained


class TellingStage(PipelineStage):
    """A stage of the library that tells of a failure as ``DataFlow`` does.

    Raises:
        StageError: a pass failed; it names stage, device, layer and micro-batch.
    """

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        """Run one micro-batch forwards."""
        with self._explained(fwd_chunk_id, "forward"):
            return super().forward_one_chunk(fwd_chunk_id, *args, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        """Run one micro-batch backwards."""
        with self._explained(bwd_chunk_id, "backward"):
            return super().backward_one_chunk(bwd_chunk_id, *args, **options)

    @contextmanager
    def _explained(self, micro_batch: int, phase: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            assert isinstance(self.submod, StageModule)
            plan = self.submod.plan
            place = Place(micro_batch, phase, self.stage_index, self.num_stages, plan.device, plan.trail.layer)
            raise_explained(error.__cause__ or error, place)
