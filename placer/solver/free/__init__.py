"""Free placements: sets of layers that need not hang together, searched for and bounded from below."""
