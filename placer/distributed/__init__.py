"""Placements on several processes: torch.distributed.pipelining, started by torchrun.

In every process::

    pipeline = placer.distributed.build(model, placement, example, loss_fn)
    optimizer = torch.optim.AdamW(pipeline.parameters())
    loss = pipeline.step(inputs, target)
    optimizer.step()

Reading order: ``layer_functions.py``, ``stage_line.py`` for the stages, ``ranks.py`` for the
processes, ``pipeline.py`` for the user's interface.
"""

from placer.utils.extras import extra

with extra("torch"):
    from placer.distributed.build import build
    from placer.distributed.pipeline import Pipeline
    from placer.distributed.ranks import Process, Seat, seats

__all__ = ["Pipeline", "Process", "Seat", "build", "seats"]
