"""Measurements and captures that are kept for later runs."""
