"""The integer program over nodes and devices, and what all integer programs share."""
