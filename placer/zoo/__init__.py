"""Reference models written as plain modules: what the demo, the examples and the benchmarks place."""
