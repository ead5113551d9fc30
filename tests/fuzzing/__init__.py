"""Random programs, differentiated through every policy and compared with plain JAX.

    python -m tests.fuzzing --programs 2000 --seed 0 --workers 2 --out fuzzing.jsonl

`operators*` are pieces of programs, `programs` puts them together, `variants` lists the ways through the library,
`running` differentiates, `judge` compares, `shrink` makes what fails small. A program is its seed: the same seed is
the same program, and what fails is printed as a script that needs nothing from here.
"""
