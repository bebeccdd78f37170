"""Tables and pictures of profiles and placements, for people."""

from placer.report.explain import explain, table

__all__ = ["explain", "table"]
