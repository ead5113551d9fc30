"""What the model knows by name and by number: facts about primitives, and every number that decides a prediction.

Nothing here follows from the graph. What XLA fuses does, as `Op.fusible` and `Op.kind`, and is not repeated.
"""

from __future__ import annotations

from collections.abc import Mapping

from remat.core.primitives import Trait, primitives_with

__all__ = [
    "ADDITIONS",
    "BYTES_PER_ADDITION",
    "CODE_ADDITIONS",
    "COMPARED",
    "COMPUTED_BYTES",
    "CONVOLUTION",
    "DETERMINED",
    "FAR",
    "INDEX_BYTES",
    "IN_PLACE",
    "MOST_KERNELS",
    "PICKS",
    "POOL_GRADIENT",
    "RANDOM_ADDITIONS",
    "SAME_BUFFER",
    "SCATTERS",
    "SEVERAL_RESULTS",
    "SMALL_SHARE",
    "TINY_SHARE",
]

# --- primitives ---

CONVOLUTION = "conv_general_dilated"
POOL_GRADIENT = "select_and_scatter_add"

# What moves no data: the result is the operand's buffer.
SAME_BUFFER = primitives_with(Trait.SAME_BUFFER)
# Operators of one operand that their result type describes: two on one operand are one.
DETERMINED = primitives_with(Trait.DETERMINED)
# Operators that take a part of an array which their result type does not tell.
PICKS = frozenset({"slice", "split", "pad", "concatenate"})
# Kinds of operators of which two from one line of the user's code, on the same operands, are taken to be one.
COMPARED = frozenset({"POINTWISE", "VIEW", "REDUCTION", "HEAVY"})
# Operators that write into their operand's buffer although they do not fuse.
IN_PLACE = primitives_with(Trait.IN_PLACE)
SCATTERS = frozenset(name for name in IN_PLACE if name.startswith("scatter"))
# What returns several arrays to XLA, however many it has in the graph: a library's call has its scratch space, too.
SEVERAL_RESULTS = primitives_with(Trait.SEVERAL_RESULTS)

# --- numbers ---

# What an array takes, and what an operator does; from XLA's sources.
INDEX_BYTES = 4  # where a pool has its largest: s32
COMPUTED_BYTES = 4  # element-wise kernels compute in float32
# Clock cycles per element relative to an addition's, from what XLA measured on an H100 (`hlo_op_profiles_data.h`,
# sm_90, float32); operators that are not here count as an addition.
ADDITIONS: Mapping[str, int] = {
    "atan2": 64,
    "cbrt": 25,
    "cos": 140,
    "div": 6,
    "erf": 67,
    "erf_inv": 67,
    "exp": 11,
    "exp2": 11,
    "expm1": 27,
    "log": 24,
    "log1p": 33,
    "log2": 24,
    "logistic": 18,
    "pow": 75,
    "rsqrt": 11,
    "sin": 140,
    "sqrt": 11,
    "tan": 140,
    "tanh": 67,
}
# Of random bits: threefry has 20 rounds of an addition, a rotation and an exclusive or, and the keys; counted.
RANDOM_ADDITIONS = 120
# Of packing a mask or reading one back: a shift, a mask and a comparison; counted.
CODE_ADDITIONS = 3
# How many bytes of memory traffic take as long as one addition: an H200 moves 4.8e12 bytes per second and issues
# about 33e12 instructions (132 multiprocessors x 128 lanes x 1.98 GHz); data sheet. An H100 has 0.101, a B200
# 0.215: programs are predicted as for an H200 whatever they are compiled for.
BYTES_PER_ADDITION = 0.145

# The others were observed, on the networks of `benchmarks.memory_model` compiled by jax 0.10 for an H200, and not
# derived. How far predictions move where one is half or twice as large is said of each: of the plans of
# `models.cases.SMALL_CASES` with min_cut, full and echo, and without (MOVES).

# A value that is made from less than this share of its own bytes is made from next to nothing: it is made early,
# and what it is made of costs nothing to read. XLA's rule for merging across the program was not found in its
# sources.
SMALL_SHARE = 1 / 8
# Kernels further apart than this, in the order of the program, are not merged for what they both read. It bounds
# the search for what depends on them; in XLA there is no such bound.
FAR = 64
# Readers of one value are compared pair by pair if there are at most so many; more are taken to be kernels of their
# own. It bounds the time.
MOST_KERNELS = 12
# Temporaries below this share of the largest get no place in a result: together they decide no peak, and each would
# be a search.
TINY_SHARE = 1 / 4096
