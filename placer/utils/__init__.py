"""General helpers: units, files, warnings, optional packages."""
