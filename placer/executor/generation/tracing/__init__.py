"""Passes of a model as operations, which are run again or compiled without the model's code."""
