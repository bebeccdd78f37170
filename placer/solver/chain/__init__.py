"""One linear order of the layers: its best cuts into stages, by dynamic programming."""
