"""The scheduling problem of a budget and its heuristics: replay, cuts, segments, chains, search."""
