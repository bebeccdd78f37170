"""Benchmarks of Placer and of its alternatives, with the results and their machines.

``python -m benchmarks NAME`` runs ``benchmarks/NAME`` and writes ``benchmarks/results/NAME.json``;
``python -m benchmarks tables`` makes the tables of README and the documentation from those files.
"""
