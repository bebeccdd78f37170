"""A model of torch's caching allocator: which pieces of memory a row of requests takes."""
