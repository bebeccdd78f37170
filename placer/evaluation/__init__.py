"""Evaluation of maps that users made, by the cost model that the solver minimises.

text of an engine ──▶ device of each layer ──▶ cost and faults ──▶ against the best placement

In all modules, ``where`` is the device of each layer. ``replicas`` has, by device of the map, all
devices that hold its layers. ``form`` is the format to which the user restricts placements, if any.
"""
