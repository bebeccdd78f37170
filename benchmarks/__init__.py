"""What is measured, against whom, and the results with the machine that they come from.

``python -m benchmarks NAME`` runs ``benchmarks/NAME`` and writes ``benchmarks/results/NAME.json``;
``python -m benchmarks tables`` makes the tables of README and the documentation from those files.
"""
