"""The OpenAPI document and the examples in it."""
