"""The integer programs of a budget and what solves them: rows, stages, bounds, Checkmate's and MONeT's models."""
