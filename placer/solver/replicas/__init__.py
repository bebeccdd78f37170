"""Replicated stages: what replicas cost, which shapes there are, and the search over them."""
