"""A JAX function becomes a joint forward and backward program, and the graph of it."""
