"""Measurements and captures stored for later runs."""
