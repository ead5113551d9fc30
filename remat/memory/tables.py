"""What the model knows by name and by number: facts about primitives, and every number that decides a prediction.

Nothing here follows from the graph. What XLA fuses does, as `Op.fusible` and `Op.kind`, and is not repeated.
"""

from __future__ import annotations

from remat.core.devices import xla_release
from remat.core.primitives import Trait, primitives_with

__all__ = [
    "CODE_CYCLES",
    "COMMUTATIVE",
    "COMPUTED_BYTES",
    "CONVOLUTION",
    "DETERMINED",
    "FAR",
    "INDEX_BYTES",
    "IN_PLACE",
    "LONGEST_ROW",
    "MATMULS_ADD_ARRAYS",
    "MERGED_BYTES",
    "MERGED_RATIO",
    "MOST_PIECES",
    "OF_SEVERAL",
    "ONLY_ALIKE_MATMULS_ARE_MERGED",
    "PARTED",
    "PIECE",
    "POOL_GRADIENT",
    "SAME_BUFFER",
    "SEVERAL_RESULTS",
    "SMALL_SHARE",
    "TINY_SHARE",
    "TUPLES_ARE_READ_DIRECTLY",
]

# --- primitives ---

CONVOLUTION = "conv_general_dilated"
POOL_GRADIENT = "select_and_scatter_add"

# What moves no data: the result is the operand's buffer.
SAME_BUFFER = primitives_with(Trait.SAME_BUFFER)
# Operators of one operand that their result type describes: two on one operand are one.
DETERMINED = primitives_with(Trait.DETERMINED)
# Operators that return the parts of an array, each a slice of its own to XLA.
PARTED = frozenset({"split", "unstack"})
# Operators of two operands in any order (`HloOpcodeIsBinaryCommutative`): XLA merges two that differ in it.
COMMUTATIVE = frozenset({"add", "add_any", "and", "max", "min", "mul", "or", "xor"})
# Operators that write into their operand's buffer although they do not fuse.
IN_PLACE = primitives_with(Trait.IN_PLACE)
# To XLA operators of several arrays: numbers beside one are arrays, too, and a power is a product of its operand.
OF_SEVERAL = frozenset({"clamp", "integer_pow", "select_n", "square"})
# What returns several arrays to XLA, however many it has in the graph: a library's call has its scratch space, too.
SEVERAL_RESULTS = primitives_with(Trait.SEVERAL_RESULTS)

# --- releases of XLA ---

# Compiled were jax 0.10.2, 0.11.0, 0.11.2 and 0.12.
# XLA reads an array out of a tuple without an operator of its own. So what stands behind a barrier is to the kernel
# that reads it what was made before the barrier, and the kernel may write over it.
TUPLES_ARE_READ_DIRECTLY = xla_release() >= (0, 12)
# Of the matmuls that share an operand XLA takes the smallest first, merges it with larger ones, up to so many times
# its size, while they are together no larger than `MERGED_BYTES`, and so on with the rest. Sizes leave out what is
# shared. As compiled: 2048 columns with 103, not with 102; 33 times 512 of 512 rows, and then the rest.
ONLY_ALIKE_MATMULS_ARE_MERGED = xla_release() >= (0, 11, 2)
MERGED_RATIO = 20
# The kernel of a matmul adds another array to its product not only if that is an argument, but whenever another
# kernel makes it: a matmul, loop, scatter or gather, or what is behind a barrier.
MATMULS_ADD_ARRAYS = xla_release() >= (0, 12)

# --- numbers ---

# Matmuls that share an operand are merged if one has no more bytes of operands and result: the default of XLA's
# flag `xla_gpu_dot_merger_threshold_mb`, as compiled: 63 MiB are merged, 64.02 are not.
MERGED_BYTES = 64 * 2**20
# A matmul reads the pieces of a concatenation, which is not written for it, if there are no more of them, along a
# dimension that is not summed over, each a multiple of so long (`kMaxParameterPerDotOperand` and
# `kMinConcatFragmentSize` of XLA's `triton_fusion_analysis` and `triton_tiling_propagation`).
MOST_PIECES, PIECE = 4, 64
# A row that is padded to a power of two has to fit into 0.4 of the 65,536 registers of a block of threads
# (`DoesTileFitsInRegisters`), or no kernel of rows is made of it.
LONGEST_ROW = 16384
# Of the others, "half and double": what predictions do where a number is half or twice as large, of the 68 cases of
# `benchmarks.memory_model` (`python -m benchmarks.memory_numbers`), and of 45 plans (min_cut, full, echo) for the
# toys of `models.cases.SMALL_CASES`, whose arrays take kilobytes. Measured when fusion was still a matter of rules.

# What an array takes; XLA's types: s32 for where a pool has its largest, float32 for what element-wise kernels
# compute.
INDEX_BYTES = 4
COMPUTED_BYTES = 4
# Of packing a mask or reading one back, per element: a shift, an and, an or or a comparison, three cycles each.
CODE_CYCLES = 9
# The others were observed, on the networks of that benchmark, and not derived.

# A value that is made from less than this share of its own bytes is made from next to nothing: it is made early,
# and what it is made of costs nothing to read. Half and double: nothing changes. Zero: 13 cases by 1.2 % at most,
# a toy by 13 %.
SMALL_SHARE = 1 / 8
# Kernels further apart than this, in the order of the program, are not merged for what they both read: the search
# for what depends on them would take too long. Half and double: no case changes, but 8 toys, by 10 % at most;
# without a bound as double.
FAR = 64
# Temporaries below this share of the largest get no place in a result, as each would be a search. Half and double:
# 0.1 % at most; toys 0.8 %. Zero: 0.1 %.
TINY_SHARE = 1 / 4096
