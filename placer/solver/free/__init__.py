"""Free placements: any sets of layers, improved by local search and bounded from below."""
