"""Running segments: pass order of calls, recorded and compiled segments, caches by shape."""
