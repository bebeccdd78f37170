"""Runs a placement's stages, corrects the profile by what they took, and places again."""
