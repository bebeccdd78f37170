"""Applies a placement to the unmodified model and runs it."""

from placer.utils.extras import need_torch

need_torch()
