"""Generation of tokens: one-token passes through the devices, recorded over static caches."""
