"""Judgement of placements: evaluation of given maps, and the timeline of one."""
