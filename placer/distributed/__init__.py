"""A placement beyond one process: on torch.distributed.pipelining, under torchrun.

In every process::

    pipeline = placer.distributed.build(model, placement, example, loss_fn)
    optimizer = torch.optim.AdamW(pipeline.parameters())
    loss = pipeline.step(inputs, target)
    optimizer.step()

Read ``layer_functions.py`` first; ``stage_line.py`` has the stages, ``ranks.py`` the processes,
``pipeline.py`` what a user holds.
"""

from placer.utils.extras import extra

with extra("torch"):
    from placer.distributed.build import build
    from placer.distributed.pipeline import Pipeline
    from placer.distributed.ranks import Process, Seat, seats

__all__ = ["Pipeline", "Process", "Seat", "build", "seats"]
