"""What docs/development.md says of a new policy, form, primitive and device: each is added here, and used."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import remat
from remat.core import classify as core_classify
from remat.core import devices, forms, primitives
from remat.core.graph import Graph
from remat.policies import Decision, Gist, MinCut, Policy, get_policy, register_policy
from remat.policies.base import required_saves
from remat.policies.registry import POLICIES
from remat.trace import classify as trace_classify
from tests.new_primitives import new_primitive


def _loss(w: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(3):
        x = jax.nn.relu(x @ w) + x
    return jnp.mean(x**2)


ARGS = (jnp.full((32, 32), 0.05), jnp.linspace(-1, 1, 16 * 32).reshape(16, 32))


def _assert_same_gradient(**options: Any) -> None:
    expected = jax.grad(_loss)(*ARGS)
    found = jax.grad(remat.checkpoint(_loss, **options))(*ARGS)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@dataclasses.dataclass(frozen=True)
class Matmuls(Policy):
    """Keeps what compute-bound operators make."""

    name: ClassVar[str] = "matmuls"

    def decide(self, graph: Graph) -> Decision:
        """Keeps their results, and what else cannot be made again."""
        wanted = {v for op in graph.forward_ops() if op.heavy for v in op.outputs}
        return Decision(required_saves(graph, frozenset(wanted)))


def test_a_policy_is_a_class_and_a_line_of_the_registry() -> None:
    register_policy("matmuls", Matmuls)
    try:
        assert get_policy("matmuls") == Matmuls()
        plan = remat.plan(_loss, *ARGS, remat_policy="matmuls")
        assert {e.op for e in plan.saved if not e.is_input} == {"dot_general"}
        _assert_same_gradient(remat_policy="matmuls")
        assert remat.plan(_loss, *ARGS, remat_policy="matmuls", budget=1.0).policy_name == "matmuls"
    finally:
        POLICIES.pop("matmuls")  # type: ignore[attr-defined]


def test_a_form_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = dataclasses.replace(
        forms.ENCODINGS["float8_e4m3"],
        name="float8_e4m3b11",
        dtype="float8_e4m3b11fnuz",
        description="lossy: 4 significant bits, at most 30",
    )
    monkeypatch.setattr(forms, "ENCODINGS", {**forms.ENCODINGS, row.name: row})
    policy = Gist(precision=row.name)
    plan = remat.plan(_loss, *ARGS, remat_policy=policy)
    kept = [entry for entry in plan.saved if entry.form == row.name]
    assert kept
    assert all(4 * entry.nbytes == entry.raw_bytes for entry in kept)
    found = jax.grad(remat.checkpoint(_loss, remat_policy=policy))(*ARGS)
    np.testing.assert_allclose(found, jax.grad(_loss)(*ARGS), rtol=0.3, atol=1e-3)


def test_a_primitive_needs_no_row_and_has_what_its_row_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    twice = new_primitive("twice_of_tests", lambda x: x + x)

    x = jnp.linspace(0, 1, 512)

    def traced() -> Any:
        """A new function each time: what was traced is remembered."""

        def loss(x: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(twice(jnp.cos(x))) ** 2)

        graph = remat.plan(loss, x).graph
        return loss, next(op for op in graph.ops if op.name == "twice_of_tests")

    _, unknown = traced()
    assert unknown.kind == "POINTWISE" and unknown.fusible
    table = {**primitives.TABLE, "twice_of_tests": primitives.TABLE["sort"]}
    for module in (primitives, core_classify, trace_classify):
        monkeypatch.setattr(module, "TABLE", table)
    loss, known = traced()
    assert known.kind == primitives.TABLE["sort"].op_class.name and not known.fusible
    expected = jax.grad(loss)(x)
    np.testing.assert_allclose(jax.grad(remat.checkpoint(loss))(x), expected, rtol=1e-5)


def test_a_device_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = dataclasses.replace(devices.H100, name="h20", bf16_flops_per_second=148e12)
    monkeypatch.setattr(devices, "DEVICES", {**devices.DEVICES, "h20": slow})
    plan = remat.plan(_loss, *ARGS, remat_policy=MinCut(device="h20", heavy="roofline"))
    assert plan.device == "h20" and "h20" in str(plan)
    assert devices.get_device("H20").target_config.count("core_count: 132") == 1
