"""Loops, branches, calls and rules of one's own: see `tests.fuzzing.operators` for the holes."""

from __future__ import annotations

from tests.fuzzing.operators_integer import Texts

__all__ = ["BRANCHES", "CALLS", "DECIDING_LOOPS", "LOOPS"]

LOOPS: Texts = {
    "scan_tanh": (
        "def {o}_body(c, e):\n    c = jnp.tanh(c * 0.9 + e)\n    return c, jnp.sin(c) * e\n"
        "{p}, {o} = lax.scan({o}_body, {a}[0], {a})"
    ),
    "scan_weights": (
        "def {o}_body(c, _):\n    return jax.nn.gelu(c @ w / 4 + b) + c * 0.5, None\n"
        "{o}, _ = lax.scan({o}_body, {a}, None, length=3)"
    ),
    "scan_max": (
        "def {o}_body(c, e):\n    h = jnp.maximum(c, e / jnp.sqrt(1 + jnp.mean(e * e)))\n"
        "    return h * 0.9, jnp.max(h)\n"
        "{p}, {o} = lax.scan({o}_body, {a}[0], {a})"
    ),
    "scan_clip": (
        "def {o}_body(c, e):\n    h = jnp.clip(c / jnp.sqrt(1 + jnp.mean(c * c)) + e, -0.7, 0.9)\n"
        "    return h, h\n"
        "{p}, {o} = lax.scan({o}_body, {m}[0], {m})"
    ),
    "scan_reverse": (
        "def {o}_body(c, e):\n    c = c * jax.nn.sigmoid(e) + e\n    return c, c\n"
        "{p}, {o} = lax.scan({o}_body, jnp.zeros({a}.shape[1:], dt), {a}, reverse=True)"
    ),
    "scan_unrolled": (
        "def {o}_body(c, e):\n    return jnp.cos(c + e), c * e\n"
        "{p}, {o} = lax.scan({o}_body, {v}[0], {v}, unroll=2)"
    ),
    "scan_dropout": (
        "def {o}_body(c, k):\n"
        "    keep = jax.random.bernoulli(k, np.float32(0.8), c.shape)\n"
        "    h = jnp.where(keep, jnp.tanh(c * 1.2), 0)\n    return h + c * 0.1, jnp.sum(h)\n"
        "{p}, {o} = lax.scan({o}_body, {a}, jax.random.split(jax.random.fold_in(key, {n}), 3))"
    ),
    "scan_in_scan": (
        "def {o}_inner(c, e):\n    return jnp.tanh(c + e * b[0]), c * e\n"
        "def {o}_outer(c, row):\n"
        "    c, out = lax.scan({o}_inner, c, row)\n    return c * 0.5, out.sum()\n"
        "{p}, {o} = lax.scan({o}_outer, {m}[0, 0], {m}[:4])"
    ),
    "scan_checkpointed": (
        "def {o}_body(c, e):\n    c = jnp.sin(c * 1.1) + jax.nn.softmax(e)\n    return c, c[:2]\n"
        "{p}, {o} = lax.scan(jax.checkpoint({o}_body, prevent_cse=False), {m}[0], {m})"
    ),
    "scan_normalized": (
        "def {o}_body(c, e):\n"
        "    m = jnp.mean(c)\n    s = jnp.mean((c - m) ** 2)\n"
        "    return (c - m) * lax.rsqrt(s + 0.1) + e, (m, s)\n"
        "{o}, ({p}, {r}) = lax.scan({o}_body, {m}[0], {m})"
    ),
    "scan_integers_along": (
        "def {o}_body(c, e):\n    n, v = c\n    n = (n + e) & 7\n"
        "    v = jnp.sin(v) * (1 + n.astype(dt) * 0.1)\n    return (n, v), n\n"
        "({p}, {o}), {r} = lax.scan({o}_body, (jnp.zeros((), {h}.dtype), {a}), {h}[:4])"
    ),
    "scan_mask_kept": (
        "def {o}_body(c, e):\n    keep = e > 0.1\n"
        "    return jnp.where(keep, c + jnp.sin(e), c * 0.5), keep\n"
        "{o}, {p} = lax.scan({o}_body, {a}[0], {a})"
    ),
    "fori_static": "{o} = lax.fori_loop(0, 3, lambda _, c: jnp.sin(c) + c * b.mean(), {a})",
    "fori_indexed": (
        "{o} = lax.fori_loop(0, 3, lambda n, c: c.at[n].set(jnp.tanh(c[n] * 0.5 + c[0])), {a})"
    ),
    "map": "{o} = lax.map(lambda e: jax.nn.softmax(e) * jnp.max(e), {m})",
    "associative_scan": "{o} = lax.associative_scan(jnp.add, jnp.tanh({a})) * 0.3",
    "associative_product": (
        "{o} = lax.associative_scan(jnp.maximum, {a} / jnp.sqrt(1 + jnp.mean({a} ** 2)))"
    ),
    "while_stopped": (
        "{p} = lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.tanh(s[1]) * 1.1), "
        "(0, lax.stop_gradient({a})))\n{o} = {p}[1] * {a}"
    ),
    "cumulative_window": "{o} = lax.reduce_window({a}, 0.0, lax.add, (2,) * {a}.ndim, (1,) * {a}.ndim, 'SAME')",
}

DECIDING_LOOPS: Texts = {
    "scan_integers_of_floats": (
        "def {o}_body(c, e):\n    n = jnp.searchsorted(jnp.array([-0.5, 0.0, 0.7]), e[0])\n"
        "    return (c + n.astype(jnp.int32)) % 5, c\n"
        "{p}, {o} = lax.scan({o}_body, jnp.zeros((), jnp.int32), {m})"
    ),
    "scan_argmax": (
        "def {o}_body(c, e):\n    n = jnp.argmax(c + e).astype(jnp.int32)\n"
        "    return c.at[n].multiply(0.5) + e * 0.1, n\n"
        "{o}, {p} = lax.scan({o}_body, {m}[0], {m})"
    ),
    "scan_sorted": (
        "def {o}_body(c, e):\n    c = jnp.sort(c * 0.7 + e)\n    return c, c[0]\n"
        "{p}, {o} = lax.scan({o}_body, {m}[0], {m})"
    ),
    "while_counted": (
        "{p} = lax.while_loop(lambda s: jnp.sum(jnp.abs(s[1])) > 5, lambda s: (s[0] + 1, s[1] * 0.6), "
        "(0, lax.stop_gradient({a})))\n{o} = {a} * (1 + {p}[0]).astype(dt)"
    ),
    "scan_rounded": (
        "def {o}_body(c, e):\n    c = jnp.round(c * 4) / 4 + jnp.tanh(e)\n    return c, c * e\n"
        "{p}, {o} = lax.scan({o}_body, {a}[0], {a})"
    ),
}

CALLS: Texts = {
    "jit": "{o} = jax.jit(lambda a, c: jnp.sin(a) * c + jnp.max(a))({a}, {c})",
    "checkpoint": "{o} = jax.checkpoint(lambda a: jnp.sin(jnp.cos(a)) * jnp.tanh(a))({a})",
    "checkpoint_norm": (
        "{o} = jax.checkpoint(lambda a: jnp.maximum(a / jnp.sqrt(1 + jnp.mean(a * a)), 0.1))({a})"
    ),
    "vmap": "{o} = jax.vmap(lambda e: jnp.tanh(e) * jnp.max(e))({a})",
    "vmap_matmul": "{o} = jax.vmap(lambda e: jax.nn.relu(e @ w))({m})",
    "named_scope": 'with jax.named_scope("part"):\n    {o} = jnp.sin({a}) * {c}',
    "custom_vjp": (
        "{o}_rule = jax.custom_vjp(lambda a: jnp.sin(a) * a)\n"
        "{o}_rule.defvjp(lambda a: (jnp.sin(a) * a, a), lambda a, g: (g * jnp.clip(a, -1, 1),))\n"
        "{o} = {o}_rule({a})"
    ),
    "custom_vjp_residual": (
        "{o}_rule = jax.custom_vjp(lambda a: jnp.max(a, -1))\n"
        "{o}_rule.defvjp(lambda a: (jnp.max(a, -1), (a, jnp.max(a, -1))), "
        "lambda r, g: (jax.nn.softmax(5 * (r[0] - r[1][..., None])) * g[..., None],))\n"
        "{o} = {o}_rule({a})"
    ),
    "custom_jvp": (
        "{o}_rule = jax.custom_jvp(lambda a: jnp.exp(jnp.tanh(a)))\n"
        "{o}_rule.defjvp(lambda p, t: ({o}_rule(*p), t[0] * jnp.cos(p[0])))\n"
        "{o} = {o}_rule({a})"
    ),
    "clip_gradient": (
        "{o}_rule = jax.custom_vjp(lambda a: a * 1.5)\n"
        "{o}_rule.defvjp(lambda a: (a * 1.5, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))\n"
        "{o} = {o}_rule({a})"
    ),
    "gradient_inside": "{o} = jax.grad(lambda a: jnp.sum(jnp.sin(a) * a))({a})",
    "gradient_of_max": (
        "{o} = jax.grad(lambda a: jnp.sum(jnp.max(jnp.sin(a), -1) ** 2))({a}) + {a}"
    ),
    "jvp_inside": "{o}, {p} = jax.jvp(jnp.tanh, ({a},), ({c},))",
    "residual_block": (
        "{p} = jax.nn.relu({m} @ w / 3 + b)\n{r} = jnp.mean({p}, 0)\n"
        "{o} = {m} + ({p} - {r}) * lax.rsqrt(jnp.var({p}, 0) + 0.01)"
    ),
}

BRANCHES: Texts = {
    "cond": "{o} = lax.cond(jnp.mean({a}) > 0.1, lambda a: jnp.sin(a), lambda a: a * a, {a})",
    "cond_integer": "{o} = lax.cond(i[0] > 2, lambda a: jnp.sort(a), lambda a: jnp.tanh(a), {a})",
    "switch": (
        "{o} = lax.switch(jnp.argmax({v}) % 3, [jnp.sin, lambda a: jnp.max(a) * a, jnp.tanh], {a})"
    ),
    "cond_in_scan": (
        "def {o}_body(c, e):\n"
        "    c = lax.cond(e.sum() > 0, lambda v: jnp.sin(v) + e, lambda v: v * 0.8, c)\n    return c, c.max()\n"
        "{p}, {o} = lax.scan({o}_body, {m}[0], {m})"
    ),
    "vmapped_cond": (
        "{o} = jax.vmap(lambda e: lax.cond(e[0] > 0.2, jnp.sin, lambda v: v * jnp.max(v), e))({m})"
    ),
}
