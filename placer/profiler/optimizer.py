"""An alias of ``placer.optimizers``."""

from placer.optimizers import OptimizerLike, OptimizerState

__all__ = ["OptimizerLike", "OptimizerState"]
