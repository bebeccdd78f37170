"""OpenAPI document and its examples."""
