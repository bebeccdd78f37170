"""Training through the pipeline: stages with passes forwards and backwards, and the optimizer
behind them.
"""
