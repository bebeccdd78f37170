"""Evaluation of maps that users made, by the cost model that the solver minimises.

text of an engine ──▶ device of each layer ──▶ cost and faults ──▶ against the best placement
"""
