"""What differs between the releases of jax, each with the release that brought it."""

from __future__ import annotations

import jax

# The derivative of tanh is one operator of its result, `one_minus_square`. Before, it was `1 - y` and products of
# this and of `y` with the cotangent, so that differentiation kept two arrays.
TANH_KEEPS_ONE_ARRAY = jax.__version_info__ >= (0, 11, 2)

# XLA:CPU deletes optimization barriers before it merges equal values: a plain jit undoes rematerialization.
CPU_UNDOES_REMATERIALIZATION = jax.__version_info__ < (0, 11, 1)

# XLA:GPU makes the zeros that loops stack into in one kernel for all of a type. So it is with 0.10.2; with 0.12 a
# stack of gradients is made when another is no longer read. (What is between was not compiled.)
ZEROS_OF_STACKS_ARE_MADE_AT_ONCE = jax.__version_info__ < (0, 12)

# The gradient of the larger of two values compares these (`x > y`, `x == y`), not each with the result.
MAXIMUM_COMPARES_OPERANDS = jax.__version_info__ >= (0, 11, 2)
