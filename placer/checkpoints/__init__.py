"""Weights from checkpoint files to the devices of a placement.

    files ──▶ tensors mapped from the files ──▶ names of the model ──▶ devices

Files are mapped into memory and read tensor by tensor, so the host never holds the whole model.
"""
