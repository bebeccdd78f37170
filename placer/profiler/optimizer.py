"""The optimizers that a profile knows, under their earlier name: see ``placer.optimizers``."""

from placer.optimizers import OptimizerLike, OptimizerState

__all__ = ["OptimizerLike", "OptimizerState"]
