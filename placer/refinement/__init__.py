"""Refinement of placements: measure the stages, correct the profile, solve again."""
