"""The command line, comparisons, trade-off curves, pictures and measurements."""
