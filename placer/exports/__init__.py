"""Placements in the formats of other engines: what each format can express, written and read.

placement ──▶ plan ──▶ units of the format ──▶ text for the engine
request ──▶ request whose placements the format can express ──▶ solve
text of an engine ──▶ device of each layer ──▶ evaluate
"""
