"""Contiguous placements: stages along the pipeline, by integer programs and by chains of ideals."""
