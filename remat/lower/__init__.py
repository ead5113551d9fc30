"""A plan becomes a JAX function: staged, or by a policy of `jax.checkpoint`."""
