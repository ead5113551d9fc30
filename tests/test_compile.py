"""What the compiler says, on the CPU and on GPUs that are not there."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from versions import CPU_UNDOES_REMATERIALIZATION

import remat.compiler.targets as targets_module
from models.development import NETWORKS
from remat.compiler.compile import CPU_COMPILER_OPTIONS, compile_report, compiler_options
from remat.compiler.toolchain import Missing, Plugin
from remat.core.devices import GPU_NAMES
from remat.core.errors import CompileError

MIB = 2**20


h200 = pytest.param("h200", marks=pytest.mark.gpu_compile)
both = pytest.mark.parametrize("device", ["cpu", h200])


def f32(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


def bf16(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.bfloat16)


def mlp(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.sum(x**2)


def scanned(x: jax.Array, weights: jax.Array) -> jax.Array:
    out, _ = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, weights)
    return jnp.sum(out)


@both
def test_product_moves_exactly_three_arrays(device: str) -> None:
    report = compile_report(lambda x, y: x * y, f32(512, 512), f32(512, 512), device=device)
    assert report.hbm_traffic_bytes == 3 * MIB
    assert (report.kernel_count, report.kernels_executed) == (1, 1)
    assert (report.argument_bytes, report.output_bytes, report.temp_bytes) == (2 * MIB, MIB, 0)
    assert report.total_bytes == 3 * MIB
    assert (report.matmuls_executed, report.convolutions_executed) == (0, 0)
    assert (report.host_temp_bytes, report.host_traffic_bytes) == (0, 0)


@both
def test_scan_of_a_matmul_runs_it_once_per_step(device: str) -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=12)[0]

    report = compile_report(f, f32(64, 64), f32(64, 64), device=device)
    assert report.matmuls_executed == 12
    assert sum(kernel.matmuls for kernel in report.kernels) == 1
    assert not any("trip count" in note for note in report.unknown)
    flops = sum(kernel.heavy_flops * kernel.trip_count for kernel in report.kernels)
    assert flops == 12 * 2 * 64**3


@both
def test_scan_reads_each_stacked_slice_once(device: str) -> None:
    def f(xs: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, x: (jnp.tanh(c + x), None), xs[0] * 0, xs)[0]

    steps, row_bytes = 64, 4 * 16384
    report = compile_report(f, f32(steps, 16384), device=device)
    body = [kernel for kernel in report.kernels if kernel.trip_count == steps]
    moved = sum(kernel.operand_bytes + kernel.result_bytes for kernel in body)
    # Read the slice and the carry, write the carry; some compilers copy one of them once.
    assert 3 * row_bytes <= moved < 6 * row_bytes
    assert report.hbm_traffic_bytes < (6 * steps + 8) * row_bytes


@both
def test_scan_writes_each_stacked_slice_once(device: str) -> None:
    def f(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (c * 2, c), x, None, length=64)[1]

    row_bytes = 4 * 16384
    report = compile_report(f, f32(16384), device=device)
    # Zeros first (64 rows), then per step: carry read and written, slice read and written.
    assert 64 * 3 * row_bytes <= report.hbm_traffic_bytes < 64 * 8 * row_bytes


@both
def test_gradient_of_three_layers_has_eight_matmuls(device: str) -> None:
    report = compile_report(jax.grad(mlp), [f32(128, 128)] * 3, f32(64, 128), device=device)
    # Three forward, three for the weights, two for the activations (none for the input).
    assert report.matmuls_executed == 8


@both
def test_gradient_of_a_scan_has_three_matmuls_per_step(device: str) -> None:
    gradient = jax.grad(scanned, argnums=(0, 1))
    report = compile_report(gradient, f32(64, 64), f32(12, 64, 64), device=device)
    assert report.matmuls_executed == 36


@both
def test_gradient_of_a_convolution_has_three(device: str) -> None:
    def f(x: jax.Array, k: jax.Array) -> jax.Array:
        layout = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=layout)
        return jnp.sum(y**2)

    gradient = jax.grad(f, argnums=(0, 1))
    report = compile_report(gradient, f32(2, 16, 16, 32), f32(3, 3, 32, 32), device=device)
    assert report.convolutions_executed == 3
    flops = [kernel.heavy_flops for kernel in report.kernels if kernel.convolutions]
    assert flops[0] == 2 * (2 * 16 * 16 * 32) * (3 * 3 * 32)


@both
def test_loop_without_trip_count_is_counted_once_and_said_so(device: str) -> None:
    def f(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda c: jnp.sum(c) < 1e3, lambda c: c @ c, x)

    report = compile_report(f, f32(32, 32), device=device)
    assert report.matmuls_executed == 1
    assert any("trip count" in note for note in report.unknown)


@both
def test_typed_keys_static_and_keyword_arguments(device: str) -> None:
    def f(key: jax.Array, x: jax.Array, rate: float, *, scale: jax.Array) -> jax.Array:
        return jnp.where(jax.random.bernoulli(key, rate, x.shape), x * scale, 0)

    x = jnp.ones((128, 128))
    call = functools.partial(compile_report, device=device, static_argnums=2)
    report = call(f, jax.random.key(0), x, 0.9, scale=f32())
    assert report.output_bytes == x.nbytes
    again = call(f, jax.eval_shape(lambda: jax.random.key(0)), x, 0.9, scale=f32())
    assert again.hbm_traffic_bytes == report.hbm_traffic_bytes


@both
def test_jitted_functions_keep_their_own_settings(device: str) -> None:
    @functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
    def f(x: jax.Array, n: int) -> jax.Array:
        return x * n

    report = compile_report(f, np.ones((256, 256), np.float32), 3, device=device)
    assert report.alias_bytes == 256 * 256 * 4
    assert report.total_bytes == 256 * 256 * 4


@both
def test_function_without_array_arguments(device: str) -> None:
    jitted = jax.jit(lambda n: jnp.arange(n, dtype=jnp.float32), static_argnums=0)
    report = compile_report(jitted, 4096, device=device)
    assert (report.argument_bytes, report.output_bytes) == (0, 4 * 4096)
    assert report.device == device


@both
def test_committed_and_closed_over_arrays(device: str) -> None:
    x = jax.device_put(jnp.ones((64, 64)), jax.devices("cpu")[0])
    table = jax.random.normal(jax.random.key(0), (64, 64))
    report = compile_report(lambda y: {"out": y @ table}, x, device=device)
    assert report.argument_bytes == x.nbytes
    assert any(f"{x.nbytes} bytes of constant" in note for note in report.unknown)


@both
def test_nothing_is_executed_and_jax_still_works_after(device: str) -> None:
    calls: list[int] = []

    def f(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: calls.append(1))
        return x + 1

    if device == "cpu":
        compile_report(f, f32(4), device=device)
    else:
        compile_report(lambda x: x + 1, f32(4), device=device)
    jax.effects_barrier()
    assert calls == []
    assert float(jax.jit(lambda x: x + 1)(1.0)) == 2.0
    assert jax.default_backend() == jax.devices()[0].platform


def test_what_a_plain_jit_on_cpu_makes_of_rematerialization() -> None:
    """As docs/cpu-and-gpu.md says: it undoes it before jax 0.11.1, and keeps it since."""

    def loss(x: jax.Array, weights: list[jax.Array], wrap: Any = jax.checkpoint) -> jax.Array:
        layer = wrap(lambda x, w: jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]))
        for weight in weights:
            x = layer(x, weight)
        return jnp.sum(x)

    arguments = (f32(256, 64), [(f32(64, 256), f32(256, 64))] * 6)
    gradient = jax.grad(loss, argnums=1)
    ours = compile_report(gradient, *arguments, device="cpu")
    plain = compile_report(gradient, *arguments, device="cpu", keep_barriers=False)
    nothing = compile_report(
        jax.grad(lambda x, w: loss(x, w, wrap=lambda f: f), argnums=1), *arguments, device="cpu"
    )
    assert ours.compiler_options == dict(CPU_COMPILER_OPTIONS)
    assert plain.compiler_options == {}
    assert ours.matmuls_executed > nothing.matmuls_executed
    assert ours.temp_bytes < 0.6 * nothing.temp_bytes
    assert (
        any("barriers were kept" in note for note in ours.unknown) == CPU_UNDOES_REMATERIALIZATION
    )
    assert any("may undo" in note for note in plain.unknown) == CPU_UNDOES_REMATERIALIZATION
    if CPU_UNDOES_REMATERIALIZATION:
        assert plain.matmuls_executed == nothing.matmuls_executed
        assert plain.temp_bytes >= nothing.temp_bytes
    else:
        assert plain.matmuls_executed == ours.matmuls_executed
        assert plain.temp_bytes == ours.temp_bytes


def test_compiler_options_are_merged() -> None:
    ours = CPU_COMPILER_OPTIONS.get("xla_disable_hlo_passes")
    own = {"xla_disable_hlo_passes": "foo", "xla_cpu_enable_fast_math": False}
    report = compile_report(lambda x: x + 1, f32(4), device="cpu", compiler_options=own)
    assert report.compiler_options == {
        "xla_disable_hlo_passes": f"{ours},foo" if ours else "foo",
        "xla_cpu_enable_fast_math": False,
    }


def test_compiler_options_helper() -> None:
    assert bool(CPU_COMPILER_OPTIONS) == CPU_UNDOES_REMATERIALIZATION
    assert compiler_options("cpu") == dict(CPU_COMPILER_OPTIONS)
    assert compiler_options("CPU") == dict(CPU_COMPILER_OPTIONS)
    assert compiler_options("gpu") == compiler_options("h100") == {}
    jitted = jax.jit(lambda x: x + 1, compiler_options=compiler_options("cpu"))
    if jax.default_backend() == "cpu":
        assert float(jitted(1.0)) == 2.0


def test_default_device_is_the_attached_one() -> None:
    report = compile_report(lambda x: x + 1, f32(4))
    assert report.is_attached
    assert report.jax_version == jax.__version__


def test_report_is_plain_data() -> None:
    report = compile_report(jax.grad(mlp), [f32(32, 32)] * 2, f32(8, 32), device="cpu")
    record = json.loads(report.to_json())
    assert record["temp_bytes"] == report.temp_bytes
    assert record["total_bytes"] == report.total_bytes
    assert len(record["kernels"]) == report.kernel_count
    traffic = sum(kernel["traffic_bytes"] for kernel in record["kernels"])
    assert traffic == record["hbm_traffic_bytes"]
    assert "hlo_text" not in record
    assert "kernels" not in report.to_dict(include_kernels=False)
    assert report.hlo_text.startswith("HloModule")
    copied = pickle.loads(pickle.dumps(report))
    assert copied == report
    assert hash(copied) == hash(report)


def test_report_prints_as_a_table() -> None:
    report = compile_report(jax.grad(mlp), [f32(32, 32)] * 2, f32(8, 32), device="cpu")
    text = str(report)
    for word in ("device", "cpu (attached)", "temp", "matmuls", "estimate", "unknown"):
        assert word in text
    table = report.kernel_table(3).splitlines()
    assert len(table) == 4
    top = report.top_kernels(3)
    assert [k.traffic_bytes for k in top] == sorted((k.traffic_bytes for k in top), reverse=True)
    assert top[0].name in table[1]


def test_cpu_has_no_roofline() -> None:
    report = compile_report(lambda x: x + 1, f32(4), device="cpu")
    assert report.roofline_seconds is None
    assert any("no data sheet" in note for note in report.unknown)


def test_unknown_device_lists_the_valid_ones() -> None:
    with pytest.raises(CompileError, match=r"'h101'.*cpu, a100, h100, h200, b200.*mean 'h100'"):
        compile_report(lambda x: x, f32(4), device="h101")


@both
def test_compiler_failure_is_our_error(device: str) -> None:
    with pytest.raises(CompileError, match="no_such_option"):
        compile_report(
            lambda x: x + 1, f32(4), device=device, compiler_options={"no_such_option": "1"}
        )


def test_errors_of_the_function_are_its_own() -> None:
    with pytest.raises(TypeError, match="dot_general"):
        compile_report(lambda x: x @ x, f32(4, 3), device="cpu")


def test_missing_plugin_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets_module, "find_plugin", lambda: None)
    expected = rf'pip install "jax\[cuda13-local\]=={jax.__version__}" nvidia-cuda-nvcc'
    with pytest.raises(CompileError, match=expected):
        compile_report(lambda x: x, f32(4), device="b200")


@pytest.fixture
def without_tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A machine whose plugin of jax is complete, and where ptxas cannot be found."""
    plugin = Plugin("jax_plugins.xla_cuda13", pathlib.Path("/nowhere"), "13")
    monkeypatch.setattr(targets_module, "find_plugin", lambda: plugin)
    monkeypatch.setattr(Plugin, "check_versions", lambda self: None)
    monkeypatch.setattr(targets_module, "missing_tools", lambda *_: Missing("ptxas", "/nowhere"))
    forget_tools()
    yield monkeypatch
    forget_tools()


def forget_tools() -> None:
    targets_module._check_tools.cache_clear()
    targets_module._failure_in_another_process.cache_clear()


def compile_without_tools(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Compiles where another process is given `program`; XLA must not be asked in this one."""

    def never(*_: Any) -> Any:
        raise AssertionError("XLA was asked, which may crash")

    monkeypatch.setattr(targets_module, "_SAMPLE_PROGRAM", program)
    monkeypatch.setattr(targets_module, "_described_gpu", never)
    monkeypatch.setattr("remat.compiler.compile.compile_for", never)
    compile_report(jax.grad(mlp), [f32(32, 32)], f32(8, 32), device="h200")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "it died of SIGSEGV"),
        ("raise RuntimeError('no PTX compiler')", "RuntimeError: no PTX compiler"),
        ("raise SystemExit(3)", "it ended with status 3"),
    ],
)
def test_where_tools_are_missing_another_process_crashes(
    without_tools: pytest.MonkeyPatch, program: str, said: str
) -> None:
    with pytest.raises(CompileError) as caught:
        compile_without_tools(without_tools, program)
    text = str(caught.value)
    assert "lacks ptxas. On Linux" in text
    assert "Looked for in /nowhere. XLA was tried in another process: " in text
    assert said in text
    assert f'pip install "jax[cuda13-local]=={jax.__version__}" nvidia-cuda-nvcc' in text


def test_a_failure_is_tried_once_and_an_installation_is_noticed(
    without_tools: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    log = tmp_path / "log"
    program = f"open({str(log)!r}, 'a').write('tried '); raise SystemExit(1)"
    for _ in range(3):
        with pytest.raises(CompileError, match="status 1"):
            compile_without_tools(without_tools, program)
    assert log.read_text() == "tried "
    without_tools.setattr(targets_module, "missing_tools", lambda *_: None)
    with pytest.raises(AssertionError, match="XLA was asked"):
        compile_without_tools(without_tools, program)


@pytest.mark.gpu_compile
def test_what_only_xla_finds_is_found_out_in_another_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Should XLA look elsewhere one day, a search that finds nothing must not stand in the way."""
    forget_tools()
    monkeypatch.setattr(targets_module, "missing_tools", lambda *_: Missing("ptxas", "/nowhere"))
    report = compile_report(jax.grad(mlp), [f32(32, 32)] * 2, f32(8, 32), device="h200")
    assert report.matmuls_executed == 5
    forget_tools()


@pytest.mark.gpu_compile
@pytest.mark.parametrize("device", GPU_NAMES)
def test_every_gpu_compiles(device: str) -> None:
    report = compile_report(lambda x, y: x @ y, bf16(1024, 1024), bf16(1024, 1024), device=device)
    assert report.device == device
    assert not report.is_attached
    assert report.matmuls_executed == 1
    assert report.roofline_seconds is not None and report.roofline_seconds > 0
    assert any("not attached" in note for note in report.unknown)


@pytest.mark.gpu_compile
def test_roofline_of_a_large_matmul_is_its_flops_at_peak() -> None:
    n = 4096
    report = compile_report(lambda x, y: x @ y, bf16(n, n), bf16(n, n), device="h200")
    (kernel,) = report.kernels
    assert kernel.traffic_bytes == 3 * n * n * 2
    assert report.roofline_seconds == pytest.approx(2 * n**3 / 989.4e12)


@pytest.mark.gpu_compile
def test_remat_shows_in_memory_and_matmuls_on_an_absent_gpu() -> None:
    def loss(x: jax.Array, weights: Any, layer: Callable[..., Any]) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda c, w: (layer(c, w), None), x, weights)[0])

    def layer(x: jax.Array, w: Any) -> jax.Array:
        return x + jnp.tanh(jnp.tanh(x @ w[0]) @ w[1])

    weights = (f32(8, 128, 512), f32(8, 512, 128))
    gradient = jax.grad(loss, argnums=1)
    call = functools.partial(compile_report, device="h200", static_argnums=2)
    none = call(gradient, f32(512, 128), weights, layer)
    full = call(gradient, f32(512, 128), weights, jax.checkpoint(layer, prevent_cse=False))
    assert full.temp_bytes < none.temp_bytes
    assert none.matmuls_executed == 8 * 6
    assert full.matmuls_executed == 8 * 8


@pytest.mark.gpu_compile
def test_offloaded_residuals_are_host_memory() -> None:
    from jax.ad_checkpoint import checkpoint_name

    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["h"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    @functools.partial(jax.checkpoint, policy=policy)
    def body(c: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.sin(checkpoint_name(jnp.tanh(c @ w), "h")), None

    def loss(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(body, x, weights)[0])

    gradient = jax.grad(loss, argnums=1)
    report = compile_report(gradient, f32(256, 256), f32(12, 256, 256), device="h200")
    stacked_bytes = 12 * 256 * 256 * 4
    assert report.host_temp_bytes == stacked_bytes
    assert report.host_traffic_bytes >= 2 * stacked_bytes
    assert any(kernel.kind == "host-copy" for kernel in report.kernels)


@pytest.mark.gpu_compile
def test_works_where_jax_was_started_without_naming_a_platform() -> None:
    program = """
import jax, jax.numpy as jnp
y = jnp.ones(4) + 1  # starts the backends: without CUDA libraries, jax gives up on the plugin
from remat.compiler.compile import compile_report
assert compile_report(lambda x: x * 2, y, device="h200").hbm_traffic_bytes == 32
assert float((y * 2).sum()) == 16.0
"""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    root = pathlib.Path(targets_module.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


class Untiled:
    """A lowered program with a matmul that XLA:GPU 0.10.2 has no tiling for without tuning; counts its compiles."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any] | None] = []

    def compile(self, compiler_options: dict[str, Any] | None) -> str:
        self.asked.append(compiler_options)
        if (compiler_options or {}).get("xla_gpu_enable_triton_gemm", True):
            raise jax.errors.JaxRuntimeError(
                "INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot.264 = f32[6304,384]{1,0} dot()"
            )
        return "compiled"


def test_a_matmul_without_a_tiling_is_the_librarys() -> None:
    lowered: Any = Untiled()
    absent = targets_module.Target("h200", "cuda", False, None, None)
    own = {"xla_gpu_autotune_level": 0}
    compiled, options = targets_module.compile_for(lowered, absent, own)
    assert compiled == "compiled"
    assert options == own | {"xla_gpu_enable_triton_gemm": False}
    # Code that is thrown away is made without LLVM's dear passes, and no report speaks of it.
    quick = {"xla_llvm_disable_expensive_passes": True}
    assert lowered.asked == [own | quick, options | quick]


@pytest.mark.parametrize(
    ("is_attached", "options"), [(True, {}), (False, {"xla_gpu_enable_triton_gemm": True})]
)
def test_nor_is_it_where_the_gpu_is_there_or_the_user_chose(
    is_attached: bool, options: dict[str, Any]
) -> None:
    lowered: Any = Untiled()
    target = targets_module.Target("h200", "cuda", is_attached, None, None)
    with pytest.raises(CompileError, match="Couldn't find output tile sizes"):
        targets_module.compile_for(lowered, target, options)
    assert len(lowered.asked) == 1
    assert is_attached == (lowered.asked == [None])


@pytest.mark.gpu_compile
def test_a_report_of_an_absent_gpu_does_not_depend_on_the_code_that_is_not_run() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.softmax(jnp.tanh(x @ w) * 0.9 + jnp.cos(x @ w)) ** 2)

    shapes = f32(128, 256), f32(512, 128)
    thorough = {"xla_llvm_disable_expensive_passes": False}
    reports = [
        compile_report(jax.grad(step), *shapes, device="h200", compiler_options=options)
        for options in ({}, thorough)
    ]
    assert [report.compiler_options for report in reports] == [{}, thorough]
    assert reports[0].hlo_text == reports[1].hlo_text
    assert reports[0].temp_bytes == reports[1].temp_bytes


@pytest.mark.slow
@pytest.mark.gpu_compile
def test_a_vit_of_197_tokens_compiles() -> None:
    loss, args = NETWORKS["vit"]()
    report = compile_report(jax.grad(loss), *args, device="h200")
    assert report.temp_bytes > 100 * MIB
    was_changed = any("all of the library" in note for note in report.unknown)
    assert was_changed == ("xla_gpu_enable_triton_gemm" in report.compiler_options)
