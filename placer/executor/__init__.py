"""Applies a placement to the unmodified model and runs it."""

from placer.extras import need_torch

need_torch()
