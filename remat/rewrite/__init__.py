"""Other joint programs with the same results: rewrites of the backward pass, implementations of operators."""
