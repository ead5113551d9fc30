"""Operators on integers, and what makes floats of them: see `tests.fuzzing.operators` for the holes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

__all__ = ["INTEGERS", "TO_FLOATS", "Texts"]

Texts: TypeAlias = Mapping[str, str]

INTEGERS: Texts = {
    "i_and": "{o} = {i} & 3",
    "i_or": "{o} = ({i} & 5) | 8",
    "i_xor": "{o} = ({i} & 7) ^ {k}",
    "i_modulo": "{o} = {i} % 5",
    "i_remainder": "{o} = lax.rem({i}, jnp.asarray(4, {i}.dtype))",
    "i_divide": "{o} = {i} // 3",
    "i_add": "{o} = {i} + {k}",
    "i_subtract": "{o} = {k} - {i}",
    "i_multiply": "{o} = ({i} & 3) * ({j} & 3)",
    "i_square": "{o} = ({i} & 3) ** 2",
    "i_shift_left": "{o} = ({i} & 3) << {k}",
    "i_shift_right": "{o} = {i} >> {k}",
    "i_logical_shift": "{o} = lax.shift_right_logical({i}, jnp.asarray(28, {i}.dtype))",
    "i_negate": "{o} = -({i} & 3)",
    "i_not": "{o} = ~({i} & 3)",
    "i_abs": "{o} = jnp.abs({i})",
    "i_sign": "{o} = jnp.sign({i} - {k})",
    "i_clip": "{o} = jnp.clip({i}, -{k}, 6)",
    "i_clamp": "{o} = lax.clamp(jnp.asarray(0, {i}.dtype), {i}, jnp.asarray(12, {i}.dtype))",
    "i_maximum": "{o} = jnp.maximum({i} & 7, {j} & 3)",
    "i_minimum": "{o} = jnp.minimum({i}, {k})",
    "i_popcount": "{o} = lax.population_count({i})",
    "i_clz": "{o} = lax.clz({i} & 7)",
    "i_where": "{o} = jnp.where({i} > {k}, {i} & 1, {j} & 7)",
    "i_from_compare": "{o} = ({i} > {j} + {k}).astype(jnp.int32) + 1",
    "i_compare": "{o} = ({i} & 3) == {k}",
    "i_cast_8": "{o} = {i}.astype(jnp.int8)",
    "i_cast_unsigned": "{o} = ({i} * {k}).astype(jnp.uint8)",
    "i_cast_16": "{o} = (({i} & 63) * 700).astype(jnp.int16)",
    "i_cast_wraps": "{o} = (({i} & 3) + 254).astype(jnp.uint8)",
    "i_bitcast": "{o} = lax.bitcast_convert_type(({i} & 3).astype(jnp.int32) - 1, jnp.uint32)",
    "i_sum": "{o} = jnp.sum({i} & 3, -1, keepdims=True)",
    "i_prod": "{o} = jnp.prod(({i} & 1) + 1, -1, keepdims=True).astype(jnp.int32) & 15",
    "i_max": "{o} = jnp.max({i}, 0, keepdims=True)",
    "i_cumsum": "{o} = jnp.cumsum({i} & 1, 0)",
    "i_cummax": "{o} = lax.cummax({i} & 7, 0)",
    "i_sort": "{o} = jnp.sort({i})",
    "i_argsort": "{o} = jnp.argsort({h}).astype(jnp.int32)",
    "i_argmax": "{o} = jnp.argmax({i}, -1, keepdims=True).astype(jnp.int32)",
    "i_top_k": "{o}, {p} = lax.top_k({h}, 2)",
    "i_roll": "{o} = jnp.roll({i} & 3, 1)",
    "i_pad": "{o} = jnp.pad({i} & 3, (1, 1), constant_values=9)",
    "i_pad_negative": "{o} = lax.pad({h} & 3, jnp.asarray(11, {h}.dtype), ((-1, 2, 1),))",
    "i_concatenate": "{o} = jnp.concatenate([{h} & 3, jnp.array([17], {h}.dtype)])",
    "i_reverse": "{o} = lax.rev({h} & 3, (0,))",
    "i_take": "{o} = ({h} & 3)[jnp.abs({h}) % {h}.shape[0]]",
    "i_take_fill": "{o} = jnp.take({h} & 3, {h}, mode='fill', fill_value=21)",
    "i_take_default_fill": "{o} = jnp.take({h} & 3, {h})",
    "i_take_clip": "{o} = jnp.take({h} & 3, {h}, mode='clip')",
    "i_set": "{o} = ({i} & 3).at[0].set({k} + 9)",
    "i_set_drop": "{o} = ({h} & 3).at[{h}].set(13, mode='drop')",
    "i_scatter_add": "{o} = ({h} & 3).at[jnp.abs({h}) % {h}.shape[0]].add(5)",
    "i_scatter_multiply": "{o} = ({i} & 3).at[1:3].multiply(6)",
    "i_scatter_max": "{o} = ({i} & 3).at[1:3].max(19)",
    "i_scatter_min": "{o} = ({i} & 3).at[:2].min(-7)",
    "i_scatter_apply": "{o} = ({i} & 3).at[1:3].apply(lambda v: v + 10)",
    "i_scatter_apply_indexed": "{o} = ({h} & 1).at[jnp.abs({h}) % {h}.shape[0]].apply(lambda v: 5 - v)",
    "i_dynamic_update": "{o} = lax.dynamic_update_slice({h} & 3, {h}[:2] | 16, (jnp.abs({h}[0]),))",
    "i_dynamic_slice": "{o} = lax.dynamic_slice({h} & 3, ({h}[0],), (3,))",
    "i_segment_sum": "{o} = jax.ops.segment_sum({h} & 3, jnp.abs({h}) % 4, 4)",
    "i_segment_max": "{o} = jnp.maximum(jax.ops.segment_max({h} & 3, jnp.abs({h}) % 4, 6), -1)",
    "i_bincount": "{o} = jnp.bincount(jnp.abs({h}) % 4, length=4).astype(jnp.int32)",
    "i_window": "{o} = lax.reduce_window({h} & 3, 0, lax.add, (3,), (1,), 'SAME')",
    "i_window_max": "{o} = lax.reduce_window({h} & 3, -5, lax.max, (2,), (1,), ((1, 1),))",
    "i_dot": "{o} = jnp.outer({h} & 3, {h} & 1)",
    "i_matmul": "{o} = jnp.outer({h} & 3, {h} & 1) @ ({h} & 3)",
    "i_arange": "{o} = jnp.arange({i}.shape[0], dtype=jnp.int32) * {k}",
    "i_one_hot": "{o} = jax.nn.one_hot({h} & 3, 4, dtype=jnp.int32)",
    "i_scan": (
        "def {o}_body(c, e):\n    c = (c * 3 + e) % 7\n    return c, c + 1\n"
        "_, {o} = lax.scan({o}_body, jnp.zeros((), {h}.dtype), {h})"
    ),
    "i_fori": "{o} = lax.fori_loop(0, {k}, lambda _, v: (v * 2 + 1) & 31, {i})",
    "i_while": "{o} = lax.while_loop(lambda v: jnp.max(v) < 40, lambda v: v * 2 + 1, {i} & 3)",
    "i_associative_scan": "{o} = lax.associative_scan(jnp.add, {h} & 3)",
    "i_cond": "{o} = lax.cond({h}[0] > 1, lambda v: v & 3, lambda v: (v & 3) + 20, {h})",
    "i_switch": "{o} = lax.switch({h}[0] & 1, [lambda v: v & 1, lambda v: v | 12], {h})",
    "i_call": "{o} = jax.jit(lambda v: jnp.where(v > 2, v & 15, 40))({i})",
    "i_vmap": "{o} = jax.vmap(lambda v: lax.select(v > 1, v & 3, v | 4))({h})",
    "i_custom": (
        "{o}_rule = jax.custom_jvp(lambda v: (v & 3) + 6)\n"
        "{o}_rule.defjvp(lambda p, t: ({o}_rule(*p), t[0]))\n{o} = {o}_rule({i})"
    ),
    "i_random_bits": "{o} = jax.random.randint(jax.random.fold_in(key, {n}), {i}.shape, -2, 9, jnp.int32)",
    "i_reduce_and": "{o} = lax.reduce({i} | 4, jnp.asarray(-1, {i}.dtype), lax.bitwise_and, (0,))[None]",
    "i_map": "{o} = lax.map(lambda e: (e & 3) * 5, {h})",
}

TO_FLOATS: Texts = {
    "times_integer": "{o} = {a}.ravel()[:{h}.shape[0]] * {h}[:{a}.size].astype(dt) * 0.2",
    "times_integer_wide": "{o} = jnp.sin({m}) * {h}[jnp.arange({m}.shape[0]) % {h}.shape[0]][:, None].astype(dt)",
    "power_of_integer": (
        "{o} = (1 + jnp.tanh({a}.ravel()[:{h}.shape[0]]) ** 2) ** jnp.clip({h}[:{a}.size], -3, 3)"
    ),
    "where_integer": (
        "{p} = {h}[jnp.arange({a}.shape[-1]) % {h}.shape[0]]\n"
        "{o} = jnp.where({p} > 5, jnp.sin({a}), {a} * {a}) + {a} * {p}.astype(dt)"
    ),
    "choose_by_integer": (
        "{p} = {h}[jnp.arange({a}.shape[-1]) % {h}.shape[0]]\n"
        "{o} = jnp.choose(jnp.abs({p}) % 3, [jnp.sin({a}), {a} * {a}, {a} * {u}], mode='clip')"
    ),
    "table": "{o} = jnp.tanh(w)[jnp.abs({i}) % w.shape[0], 0] * jnp.sum({d} * {d})",
    "sum_integers": "{o} = {a} * jnp.sum({i}).astype(dt) * 0.01",
    "attention_mask": (
        "{p} = {h}[jnp.arange({m}.shape[0]) % {h}.shape[0]]\n"
        "{o} = jax.nn.softmax(jnp.where({p}[:, None] >= {p}[None], {m} @ {m}.T, -1e4)) @ {m}"
    ),
}
