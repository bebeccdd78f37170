"""A stage of the library that reports where a pass failed; the library hides the layer's error."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch.distributed.pipelining import PipelineStage

from placer.distributed.stage import StageModule
from placer.distributed.state.gradient_sums import GradientSums
from placer.executor.stage_errors import Place, explain
from placer.utils.error_translation import ErrorTranslation


class ReportingStage(PipelineStage):
    """A library stage that reports failures like ``DataFlow``.

    Attributes:
        sums: of gradients over replicas, which begin in the last backward pass; None to begin after
            it.

    Raises:
        StageError: if a pass failed; it names stage, device, layer and micro-batch.
    """

    sums: GradientSums | None = None

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        """Run one micro-batch forward."""
        with self._explained(fwd_chunk_id, "forward"):
            return super().forward_one_chunk(fwd_chunk_id, *args, **options)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        """Run one micro-batch backward."""
        is_last = self.sums is not None and options.get("last_backward", False)
        watched = self.sums.watched() if self.sums is not None and is_last else nullcontext()
        with self._explained(bwd_chunk_id, "backward"), watched:
            return super().backward_one_chunk(bwd_chunk_id, *args, **options)

    def _explained(self, micro_batch: int, phase: str) -> ErrorTranslation:
        """Convert an error inside to a StageError that names the pass."""

        def explained(error: BaseException) -> BaseException:
            if not isinstance(error, Exception):
                return error
            assert isinstance(self.submod, StageModule)
            plan = self.submod.plan
            place = Place(
                micro_batch, phase, self.stage_index, self.num_stages, plan.device, plan.trail.layer
            )
            return explain(error.__cause__ or error, place)

        return ErrorTranslation(explained)
