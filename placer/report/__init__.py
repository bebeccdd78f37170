"""Human-readable tables and pictures of profiles and placements."""

from placer.report.comparing import compare, comparison_table
from placer.report.comparison_page import comparison_report
from placer.report.explain import explain, table
from placer.report.page import html_report
from placer.report.pictures import picture

__all__ = [
    "compare",
    "comparison_report",
    "comparison_table",
    "explain",
    "html_report",
    "picture",
    "table",
]
