"""How good the solver's answers are, and how fast it proves them."""
