"""This machine as a node: its devices, registration, and measurements of graphs."""
