"""Application of placements to unmodified models, and their execution."""

from placer.utils.extras import need_torch

need_torch()
