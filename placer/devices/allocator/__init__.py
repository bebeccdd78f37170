"""A model of torch's caching allocator: the memory that a sequence of requests takes."""
