"""Every jax primitive, classified on purpose: its kind, its flops, whether XLA fuses it, if it may run twice.

`TABLE` is where the library says what a primitive does by its name; other rooms read it, with `primitives_with`
where a trait matters. Imports no jax, so that the table can be read and tested on its own. Decisions that are not
obvious:

- *Fusible* is what XLA:GPU does (`IsUniversallyLoopFusible` in XLA's `gpu_fusible.cc`, and compiled
  for an H200): element-wise operators, data movement, threefry, `gather`, `dynamic_slice` and
  `dynamic_update_slice` are fused on both sides; a sum is fused with what it reads. A
  `reduce_window` is fused with what it reads only if its windows do not overlap; the results of a
  multi-output reduction (`argmax`) and of a scatter become buffers; a product without a contracted
  axis is a multiplication to XLA.
- JAX's random numbers are a function of their key, so they may be recomputed; `rng_uniform` is
  stateful and may not. Deriving keys is cheap and does not count as random.
- A collective is never repeated, except for those that communicate nothing: `axis_index`, and the
  identities (`pvary`, ...) that change what a type says about a mesh axis. A sharding constraint is
  taken as the identity it is on one device.

What depends on parameters is in `remat.core.classify`. What has no row, such as the primitives that only occur in
the body of a kernel, is opaque there; `remat.trace.classify` then looks at what it lowers to.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from remat.core import flop_counts as counts
from remat.core.flop_counts import Counter

__all__ = ["EFFECT_REASON", "TABLE", "OpClass", "OpSpec", "SCATTERS", "Trait", "primitives_with"]


class OpClass(enum.Enum):
    """What kind of operator a primitive is."""

    POINTWISE = "pointwise"  # an output element depends on the same element of each input
    VIEW = "view"  # moves, repeats or reinterprets, or makes from nothing (iota); no arithmetic
    REDUCTION = "reduction"  # combines the elements along some axes; running totals too
    HEAVY = "heavy"  # compute bound or a library call: matmuls, convolutions, factorisations
    INDEXED = "indexed"  # addresses depend on data or on a sliding window
    RANDOM = "random"  # random bits, and the plumbing of the keys
    CONTROL = "control"  # has bodies that run zero, one or many times, or on shards
    CALL = "call"  # has a body that runs once: to be inlined
    COLLECTIVE = "collective"  # belongs to all devices of a mesh axis
    EFFECT = "effect"  # talks to the host, to mutable references or to hidden state
    METADATA = "metadata"  # an identity that carries a name, a constraint or a dependence
    OPAQUE = "opaque"  # nothing is known about what it does


class Trait(enum.Enum):
    """What else holds for a primitive by its name, whatever its parameters."""

    EXACT = "exact"  # the same bits from the same operands, in whatever kernel
    COMPARISON = "comparison"  # says how two elements compare
    TIES = "ties"  # results jump where elements of one operand cross each other
    JUMPS = "jumps"  # results jump between integers, orders, pivots, signs of eigenvectors, draws of a sampler
    NEVER_NEGATIVE = "never negative"  # results are zero or more, whatever the operands
    KEEPS_SIGN = "keeps sign"  # results are zero or more if all operands are
    DIFFERENCE = "difference"  # zero or one where the operands are equal, or opposite
    PATCHES = "patches"  # the result has elements of several operands side by side
    ADDS = "adds"  # elements of the result are sums
    TOTAL = "total"  # these are sums of elements of one operand
    NAMED_BODY = "named body"  # has a body, which does what the name says
    SAME_BUFFER = "same buffer"  # moves no data: to XLA the result is the operand's buffer
    IN_PLACE = "in place"  # writes into its operand's buffer although XLA does not fuse it
    SEVERAL_RESULTS = (
        "several results"  # returns several arrays to XLA, however many it has in the graph
    )
    DETERMINED = (
        "determined"  # described by its name and its result's type: two on one operand are one
    )


@dataclass(frozen=True, slots=True)
class OpSpec:
    """One row of `TABLE`: what holds for a primitive whatever its parameters.

    Attributes:
        op_class: its kind.
        count: flops from parameters, input avals and output avals.
        fusible: see `OpCost`.
        random: see `OpCost`.
        effectful: see `OpCost`.
        recomputable: see `OpCost`.
        reason: why it is not recomputable.
        traits: what else holds for it; see `Trait`.
    """

    op_class: OpClass
    count: Counter
    fusible: bool = False
    random: bool = False
    effectful: bool = False
    recomputable: bool = True
    reason: str = ""
    traits: frozenset[Trait] = frozenset()


# --- weights ------------------------------------------------------------------------------------

# Operations per element, in units of one multiplication, as a vectorised kernel without special
# hardware spends them: a polynomial of the needed degree and a range reduction. They rank operators
# and hardly ever decide alone: a pointwise operator is bound by memory traffic up to some fifty
# operations per element (Yu & He, section 3.1).
_POINTWISE_WEIGHTS: Mapping[int, str] = MappingProxyType(
    {
        0: "real imag",
        1: """
            abs and ceil clz complex conj convert_element_type copysign eq eq_to floor ge gt
            is_finite le le_to lt lt_to max min mulhi ne not or population_count reduce_precision
            round select select_n shift_left shift_right_arithmetic shift_right_logical sign xor
        """,
        2: "clamp stochastic_round",
        3: "one_minus_square",
        4: "nextafter reciprocal rsqrt sqrt",
        6: "rem",
        10: "cbrt exp exp2 expm1 log log1p log2 logistic tanh",
        15: "cos cosh erf erfc sin sinh",
        20: "acos acosh asin asinh atan atan2 atanh erf_inv pow tan",
        40: "bessel_i0e bessel_i1e digamma lgamma",
        200: "igamma igamma_grad_a igammac polygamma regularized_incomplete_beta zeta",
    }
)

# --- reasons ------------------------------------------------------------------------------------

_CONTROL = "a loop or branch is planned as a whole, it is not repeated"
_CALL = "a call is inlined; its operators are decided one by one"
_COLLECTIVE = "a collective is never repeated: it costs traffic between devices"
EFFECT_REASON = "it has side effects and must run exactly once"
_CUSTOM = "a custom call: what it does cannot be seen"

# --- the table ----------------------------------------------------------------------------------


def _rows(names: str, spec: OpSpec) -> dict[str, OpSpec]:
    return dict.fromkeys(names.split(), spec)


def _pointwise() -> dict[str, OpSpec]:
    def spec(count: Counter) -> OpSpec:
        return OpSpec(OpClass.POINTWISE, count, fusible=True)

    # A transcendental function of a complex number is about four of a real one.
    rows: dict[str, OpSpec] = {}
    for weight, names in _POINTWISE_WEIGHTS.items():
        complex_weight = weight if weight <= 1 else 4 * weight
        rows |= _rows(names, spec(counts.arithmetic(weight, complex_weight)))
    rows |= _rows("add add_any sub neg", spec(counts.arithmetic(1, 2)))
    rows |= _rows("mul square", spec(counts.arithmetic(1, 6)))
    rows["div"] = spec(counts.arithmetic(counts.DIVIDE, 4 * counts.DIVIDE))
    rows["integer_pow"] = spec(counts.integer_pow)
    return rows


def _views() -> dict[str, OpSpec]:
    view = OpSpec(OpClass.VIEW, counts.free, fusible=True)
    unspecified = replace(view, fusible=False)  # an allocation: any contents will do
    return _rows(
        """
        bitcast_convert_type broadcast broadcast_in_dim broadcast_to concatenate copy copy_p
        expand_dims from_edtype iota iota_2x32_shape pad reshape rev slice split squeeze stack tile
        to_edtype transpose unstack zeros_like
        """,
        view,
    ) | _rows("empty empty2", unspecified)


def _reductions() -> dict[str, OpSpec]:
    single = OpSpec(OpClass.REDUCTION, counts.per_input(1), fusible=True)
    # XLA makes a scan of log n passes of a running total, in kernels of their own.
    running = OpSpec(OpClass.REDUCTION, counts.per_input(2))
    return (
        _rows(
            "reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor", single
        )
        | _rows("argmax argmin", replace(single, fusible=False))
        | _rows("reduce", replace(single, count=counts.reduce))
        | _rows("cummax cummin cumprod cumsum", running)
        | _rows("cumlogsumexp", replace(running, count=counts.per_input(50)))
    )


def _heavy() -> dict[str, OpSpec]:
    def spec(count: Counter) -> OpSpec:
        return OpSpec(OpClass.HEAVY, count)

    return {
        "dot_general": spec(counts.dot_general),
        "scaled_dot": spec(counts.dot_general),
        "conv_general_dilated": spec(counts.convolution),
        **_rows("ragged_dot ragged_dot_general", spec(counts.ragged_dot_general)),
        **_rows("scaled_matmul scaled_matmul_wrapper", spec(counts.matmul_last_axis)),
        "fft": spec(counts.fft),
        "sort": spec(counts.sort),
        "top_k": spec(counts.top_k),
        "approx_top_k": spec(counts.per_input(1)),
        "cholesky": spec(counts.cubic(1, 3)),
        "cholesky_update": spec(counts.quadratic(4)),
        "eig": spec(counts.cubic(25)),
        "eigh": spec(counts.cubic(9)),
        "schur": spec(counts.cubic(25)),
        "hessenberg": spec(counts.cubic(10, 3)),
        "tridiagonal": spec(counts.cubic(4, 3)),
        "svd": spec(counts.svd),
        "lu": spec(counts.lu),
        "qr": spec(counts.qr),
        **_rows("geqrf geqp3 householder_product", spec(counts.reflectors)),
        "ormqr": spec(counts.apply_reflectors),
        "lu_pivots_to_permutation": spec(counts.per_output(1)),
        "triangular_solve": spec(counts.triangular_solve),
        "tridiagonal_solve": spec(counts.per_output(8)),
        "symmetric_product": spec(counts.symmetric_product),
        "spsolve": spec(counts.per_input(50)),
        **_rows(
            """
            bcoo_dot_general bcoo_dot_general_sampled bcoo_spdot_general bcsr_dot_general coo_matmat
            coo_matvec coo_spmm coo_spmv csr_matmat csr_matvec csr_spmm csr_spmv
            """,
            spec(counts.sparse_product),
        ),
        **_rows(
            """
            dot_product_attention_fwd dot_product_attention_fwd_wrapper
            dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper
            """,
            spec(counts.attention(2)),
        ),
        **_rows(
            """
            dot_product_attention_bwd dot_product_attention_bwd_wrapper
            dot_product_attention_fp8_bwd dot_product_attention_fp8_bwd_wrapper
            """,
            spec(counts.attention(5)),
        ),
        "rnn_fwd": spec(counts.rnn(1)),
        "rnn_bwd": spec(counts.rnn(2)),
        "pallas_call": spec(counts.kernel_estimate),
    }


def _indexed() -> dict[str, OpSpec]:
    fused = OpSpec(OpClass.INDEXED, counts.free, fusible=True)
    own_kernel = OpSpec(OpClass.INDEXED, counts.free)
    windowed = replace(own_kernel, count=counts.windows_of_output(1))
    return (
        _rows("gather dynamic_slice dynamic_update_slice", fused)
        | _rows("scatter bcoo_fromdense bcoo_todense bcsr_fromdense bcsr_todense", own_kernel)
        | _rows("coo_fromdense coo_todense csr_fromdense csr_todense todense", own_kernel)
        | _rows("bcoo_extract bcsr_extract bcoo_transpose", own_kernel)
        | _rows(
            "bcoo_sort_indices bcoo_sum_duplicates",
            replace(own_kernel, count=counts.per_input(10)),
        )
        | _rows(
            """
            scatter-add scatter-max scatter-min scatter-mul scatter-sub scatter_add scatter_max
            scatter_min scatter_mul
            """,
            replace(own_kernel, count=counts.scatter_combine),
        )
        | _rows("reduce_window reduce_window_max reduce_window_min reduce_window_sum", windowed)
        | _rows("select_and_gather_add", replace(own_kernel, count=counts.windows_of_output(2)))
        | _rows(
            "select_and_scatter select_and_scatter_add",
            replace(own_kernel, count=counts.select_and_scatter),
        )
    )


def _randoms() -> dict[str, OpSpec]:
    plumbing = OpSpec(OpClass.RANDOM, counts.free, fusible=True)
    draws = OpSpec(OpClass.RANDOM, counts.random_bits, fusible=True, random=True)
    return {
        **_rows("random_clone random_unwrap random_wrap", plumbing),
        **_rows(
            "random_fold_in random_seed random_split",
            replace(plumbing, count=counts.per_output(counts.THREEFRY)),
        ),
        "random_bits": draws,
        **_rows(
            "threefry2x32 threefry4x32", replace(draws, count=counts.per_output(counts.THREEFRY))
        ),
        **_rows(
            "philox2x32 philox4x32",
            replace(draws, count=counts.per_output(2 * counts.PHILOX_WORD)),
        ),
        "rng_bit_generator": OpSpec(
            OpClass.RANDOM,
            counts.philox_words,
            random=True,
        ),
        "random_gamma": OpSpec(
            OpClass.RANDOM, counts.per_output(10 * counts.THREEFRY), random=True
        ),
        "rng_uniform": OpSpec(
            OpClass.RANDOM,
            counts.per_output(counts.PHILOX_WORD),
            random=True,
            effectful=True,
            recomputable=False,
            reason="its generator is stateful: a second run gives other numbers",
        ),
    }


def _bodies() -> dict[str, OpSpec]:
    control = OpSpec(OpClass.CONTROL, counts.free, recomputable=False, reason=_CONTROL)
    call = OpSpec(OpClass.CALL, counts.free, recomputable=False, reason=_CALL)
    return _rows(
        "cond custom_linear_solve program_order scan shard_map while xla_pmap", control
    ) | _rows(
        """
        call checkpoint closed_call composite core_call core_closed_call custom_jvp_call
        custom_jvp_call_jaxpr custom_lin custom_transpose custom_transpose_call custom_vjp_call
        custom_vjp_call_jaxpr custom_vmap_call eval_jaxpr jit linear_call pjit remat remat2 remat_deferred
        remat_call remat_opt xla_call
        """,
        call,
    )


def _collectives() -> dict[str, OpSpec]:
    moves = OpSpec(OpClass.COLLECTIVE, counts.free, recomputable=False, reason=_COLLECTIVE)
    combines = replace(moves, count=counts.per_input(1))
    # These communicate nothing: an index, and identities that change what a type says of an axis.
    local = OpSpec(OpClass.COLLECTIVE, counts.free, fusible=True)
    return (
        _rows(
            """
            all_gather all_gather_done all_gather_invariant all_gather_reduced
            all_gather_reduced_start all_gather_start all_to_all all_to_all_done all_to_all_start
            global_array_to_host_local_array host_local_array_to_global_array pbroadcast
            pbroadcast_done pbroadcast_dynamic pbroadcast_start pgather ppermute ppermute_done ppermute_start precv
            psend ragged_all_to_all reshard
            """,
            moves,
        )
        | _rows(
            """
            pmax pmin psum psum2 psum_done psum_invariant psum_invariant_start psum_start
            reduce_scatter reduce_scatter_done reduce_scatter_start unreduced_pmax unreduced_pmin
            unreduced_psum unreduced_psum_start unreduced_reduce_scatter
            unreduced_reduce_scatter_start
            """,
            combines,
        )
        | _rows("axis_index preduced pvary reduced_vary_cast reduced_vary_cast_p", local)
        | _rows("vary_unreduced_cast vary_unreduced_cast_p", local)
    )


def _effects() -> dict[str, OpSpec]:
    effect = OpSpec(
        OpClass.EFFECT, counts.free, effectful=True, recomputable=False, reason=EFFECT_REASON
    )
    pure = replace(
        effect, effectful=False, reason="a callback goes through the host, it is not repeated"
    )
    return _rows(
        """
        accum_grad_in_ref addupdate after_all box_get box_set buffer_callback check core_map
        create_linear create_token dce_sink debug_callback debug_print empty_ref free_ref freeze get
        infeed inspect_sharding io_callback log_extend log_read new_box new_log new_ref outfeed
        outside_call pin run_scoped run_state shape_assertion swap unpin unreachable
        """,
        effect,
    ) | _rows("pure_callback", pure)


def _metadata() -> dict[str, OpSpec]:
    identity = OpSpec(OpClass.METADATA, counts.free, fusible=True)
    return _rows(
        """
        add_dependency assert_consumed_value consume dim_as_value dimension_size mesh_cast name
        platform_index row_major shard_alike sharding_constraint stage stop_gradient tie xla_metadata_value
        """,
        identity,
    ) | _rows(
        "device_put layout_constraint optimization_barrier relayout",
        replace(identity, fusible=False),
    )


def _opaques() -> dict[str, OpSpec]:
    custom = OpSpec(OpClass.OPAQUE, counts.free, recomputable=False, reason=_CUSTOM)
    return _rows(
        """
        call_exported call_hi_primitive call_hi_primitive_linearized call_tf compute_on cudnn_fusion
        custom_call custom_partitioning ffi_call fused_call mosaic_gpu_p mpmd_map tpu_custom_call
        with_memory_space_constraint xla_metadata_call
        """,
        custom,
    )


def _disjoint(*groups: dict[str, OpSpec]) -> dict[str, OpSpec]:
    """Merges the groups, and fails if a name is in two of them."""
    table: dict[str, OpSpec] = {}
    for group in groups:
        twice = table.keys() & group.keys()
        if twice:
            raise ValueError(f"primitives classified twice: {', '.join(sorted(twice))}")
        table |= group
    return table


# --- traits -------------------------------------------------------------------------------------

_TRAITS: Mapping[Trait, str] = MappingProxyType(
    {
        Trait.EXACT: """
            abs argmax argmin bitcast_convert_type broadcast broadcast_in_dim ceil clamp concatenate copy
            copy_p copysign cummax cummin dynamic_slice dynamic_update_slice eq eq_to expand_dims floor
            gather ge gt imag iota is_finite le le_to lt lt_to max min ne neg optimization_barrier pad
            pvary real reduce_max reduce_min reduce_window_max reduce_window_min rem reshape rev round
            scatter-max scatter-min select_n sharding_constraint sign slice sort split squeeze stack
            stop_gradient tile top_k transpose unstack
        """,
        Trait.COMPARISON: "eq eq_to ge gt le le_to lt lt_to ne",
        Trait.TIES: "select_and_gather_add select_and_scatter select_and_scatter_add",
        Trait.JUMPS: """
            approx_top_k argmax argmin bitcast_convert_type ceil eig eigh floor geqp3 geqrf hessenberg lu
            qr random_gamma rem round schur sort svd top_k tridiagonal
        """,
        Trait.NEVER_NEGATIVE: "abs exp exp2 logistic sqrt square",
        Trait.KEEPS_SIGN: """
            add add_any broadcast_in_dim concatenate convert_element_type copy cumsum div gather max min
            mul optimization_barrier pow reduce_max reduce_min reduce_prod reduce_sum reshape rev select_n
            slice squeeze stop_gradient transpose
        """,
        Trait.DIFFERENCE: "add add_any atan2 complex div dot_general sub",
        Trait.PATCHES: "clamp concatenate dynamic_update_slice max min pad scatter select_n stack",
        Trait.ADDS: "add add_any cumsum dot_general reduce_sum reduce_window_sum sub",
        Trait.TOTAL: "cumsum reduce_sum reduce_window_sum",
        Trait.NAMED_BODY: "scatter-max scatter-min",
        Trait.SAME_BUFFER: """
            copy copy_p device_put expand_dims mesh_cast name pvary reshape sharding_constraint squeeze
            stop_gradient
        """,
        Trait.IN_PLACE: """
            scan scatter scatter-add scatter-max scatter-min scatter-mul scatter-sub scatter_add
            select_and_scatter_add while
        """,
        Trait.SEVERAL_RESULTS: "conv_general_dilated scan sort while",
        Trait.DETERMINED: """
            abs ceil convert_element_type cos erf exp exp2 floor is_finite log log1p log2 logistic neg not
            one_minus_square rsqrt sign sin sqrt square tanh
        """,
    }
)


def _with_traits(rows: dict[str, OpSpec]) -> Mapping[str, OpSpec]:
    """Writes the traits into the rows, and fails if one is said of a primitive without a row."""
    for trait, names in _TRAITS.items():
        for name in names.split():
            if name not in rows:
                raise ValueError(f"{name} is said to be {trait.value}, and has no row")
            rows[name] = replace(rows[name], traits=rows[name].traits | {trait})
    return MappingProxyType(rows)


TABLE: Mapping[str, OpSpec] = _with_traits(
    _disjoint(
        _pointwise(),
        _views(),
        _reductions(),
        _heavy(),
        _indexed(),
        _randoms(),
        _bodies(),
        _collectives(),
        _effects(),
        _metadata(),
        _opaques(),
    )
)
"""The primitives of jax 0.10, 0.11 and 0.12, by name, and older spellings of the same ones.

Left out on purpose is what `remat.trace.classify` knows more of (`polynomial` is element-wise or a loop, as its
degree says), and what only occurs in the body of a kernel.
"""


def primitives_with(trait: Trait) -> frozenset[str]:
    """Returns the names of the primitives that have a trait."""
    return frozenset(name for name, spec in TABLE.items() if trait in spec.traits)


SCATTERS = frozenset(name for name in primitives_with(Trait.IN_PLACE) if name.startswith("scatter"))
"""Operators that write parts of an array, over what was there."""
