"""Benchmarks: what the compiler says (`compiled`), planning time (`planning`), step time (`gpu`)."""
