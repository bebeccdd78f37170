"""Small helpers that know nothing of placements: units, files, warnings, optional packages."""
