"""Solves for the placement with the best objective, and checks it."""
