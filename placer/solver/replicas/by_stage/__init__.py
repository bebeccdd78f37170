"""Stages that each have a number of replicas of their own: costs, bounds, search, and answer."""
