"""The integer program by node and device: costs and memory as constraints, and what every program
is run by.
"""
