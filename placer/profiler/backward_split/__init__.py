"""Measurements of backward passes that compute input and weight gradients separately."""
