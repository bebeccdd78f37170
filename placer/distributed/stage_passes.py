"""A stage of the library that reports where a pass failed; the library hides the layer's error."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from placer.distributed.stage import Plan, StageModule, examples, weight_pass
from placer.distributed.state.gradient_sums import GradientSums
from placer.executor.stage_errors import Place, explain
from placer.utils.error_translation import ErrorTranslation


class ReportingStage(PipelineStage):
    """A library stage that reports failures like ``DataFlow``.

    Attributes:
        sums: of gradients over replicas, which begin in the last backward pass; None to begin after
            it.
        units: the number of passes for each micro-batch, which follow one another.

    Raises:
        StageError: if a pass failed; it names stage, device, layer and micro-batch.
    """

    sums: GradientSums | None = None
    units: int = 1

    @classmethod
    def from_module(
        cls,
        module: StageModule,
        index: int,
        count: int,
        training: bool,
        group: dist.ProcessGroup | None,
    ) -> Self:
        """Return the library's stage of a module.

        Args:
            module: the stage's layers.
            index: the position of the stage in the line.
            count: the number of stages in the line.
            training: whether the library runs backward passes.
            group: the processes of the pipeline.
        """
        plan = module.plan
        return cls(
            module,
            index,
            count,
            plan.device,
            input_args=_given(plan)
            if plan.is_first
            else examples(plan.arrives, plan.marks_in, training),
            output_args=_returned(plan)
            if plan.is_last
            else examples(plan.leaves, bool(plan.marks_out), training),
            group=group,
            dw_builder=weight_pass(module) if plan.deferred is not None else None,
        )

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

    def _explained(self, chunk: int, phase: str) -> ErrorTranslation:
        """Convert an error inside to a StageError that names the pass."""

        def explained(error: BaseException) -> BaseException:
            if not isinstance(error, Exception):
                return error
            assert isinstance(self.submod, StageModule)
            plan = self.submod.plan
            place = Place(
                chunk // self.units,
                phase,
                self.stage_index,
                self.num_stages,
                plan.device,
                plan.trail.layer,
            )
            return explain(error.__cause__ or error, place)

        return ErrorTranslation(explained)


class UnitStage(ReportingStage):
    """A stage whose neighbours differ from unit to unit, see ``schedules.UnitSchedule``.

    Before the first step, the library lets every stage agree with its neighbours on how to find the
    shapes of tensors, and connects them. Here shapes are given, and all processes are connected.
    """

    def __init__(
        self, submodule: StageModule, stage_index: int, num_stages: int, *args: Any, **options: Any
    ) -> None:
        # the library refuses more processes than stages; it has no other use for their number
        accepted = max(num_stages, dist.get_world_size(options.get("group")))
        super().__init__(submodule, stage_index, accepted, *args, **options)
        self.num_stages = num_stages

    # 1 in the vote stands for shapes that are given
    def _warmup_forward_vote(self, *_: Any, **__: Any) -> torch.Tensor:
        return torch.ones(1, dtype=torch.int32)

    def _warmup_backward_result(self, *_: Any, **__: Any) -> torch.Tensor:
        return torch.ones(1, dtype=torch.int32)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # called instead by versions of the library without a vote
        return []


def _given(plan: Plan) -> tuple[torch.Tensor, ...]:
    """Return meta tensors like the flat inputs of one micro-batch."""
    values = [parcel.value for parcel in plan.arrives]
    return tuple(
        torch.empty(value.shape or (1,), dtype=value.dtype, device="meta") for value in values
    )


def _returned(plan: Plan) -> tuple[torch.Tensor, ...]:
    """Return meta tensors like the model's flat outputs."""
    return tuple(
        torch.empty(parcel.value.shape, dtype=parcel.value.dtype, device="meta")
        if parcel.value.dtype is not None
        else parcel.example(False)
        for parcel in plan.leaves
    )
