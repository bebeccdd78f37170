"""The stages of a training pipeline: slots, weight aliases, recomputation and compilation."""
