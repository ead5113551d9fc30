"""Reference networks for the tests and benchmarks of `remat`; not part of the wheel.

Every module offers functions that return `(function, example_args)`: a pure function that is
differentiated with respect to its first argument, and a tuple of pytrees of
`jax.ShapeDtypeStruct`, so that a network of any size is described without allocating it.
`models.cases` names the ones that the tests, the benchmarks and the command line use.
"""
