"""Objective latency: list schedules, and layers moved by what both passes then take."""
