"""Matrix multiplications and convolutions in an HLO instruction, and their flops. No jax."""

from __future__ import annotations

import dataclasses
import math
import re

from remat.compiler.hlo import Computation, Instruction, Module, Shape

_MATMUL_TARGETS = ("__cublas$gemm", "__cublas$lt$", "__onednn$matmul", "__onednn$batch_matmul")
_CONVOLUTION_TARGETS = ("__cudnn$conv", "__onednn$convolution")


@dataclasses.dataclass(frozen=True)
class HeavyWork:
    """Matrix work in one instruction, one execution.

    Attributes:
        matmuls: number of dots.
        convolutions: number of convolutions.
        flops: of both; a multiplication and an addition are two.
        dtype: HLO type of the widest left operand; empty if there is no such work.
        is_library_matmul: whether the instruction itself is a call into cuBLAS, cuDNN or oneDNN.
    """

    matmuls: int = 0
    convolutions: int = 0
    flops: int = 0
    dtype: str = ""
    is_library_matmul: bool = False

    def __add__(self, other: HeavyWork) -> HeavyWork:
        return HeavyWork(
            self.matmuls + other.matmuls,
            self.convolutions + other.convolutions,
            self.flops + other.flops,
            self.dtype or other.dtype,
        )


def heavy_work(module: Module, where: Computation, instruction: Instruction) -> HeavyWork:
    """Counts the matrix work of an instruction and of the computations fused into it."""
    opcode = instruction.opcode.removesuffix("-start")
    shapes = [where.by_name[name].shape for name in instruction.operands]
    if opcode == "dot":
        contracted = _numbers(instruction.attributes.get("lhs_contracting_dims", ""))
        flops = _dot_flops(instruction.shape, shapes[0], contracted)
        return HeavyWork(matmuls=1, flops=flops, dtype=shapes[0].dtype)
    if opcode == "convolution":
        flops = _convolution_flops(instruction, instruction.shape, shapes[1])
        is_dot = _is_matmul(instruction)
        return HeavyWork(int(is_dot), int(not is_dot), flops, shapes[0].dtype)
    if opcode == "custom-call":
        return _library_work(instruction, shapes)
    if opcode != "fusion":
        return HeavyWork()
    total = HeavyWork()
    for name in instruction.called("calls"):
        fused = module.computations[name]
        for inner in fused.instructions:
            total += heavy_work(module, fused, inner)
    return total


def _is_matmul(convolution: Instruction) -> bool:
    """Whether it is what XLA:TPU makes of a matmul: it was one, or it slides over nothing."""
    made_of = (convolution.op_name or "").rpartition("/")[2]
    labels = convolution.attributes.get("dim_labels", "").partition("_")[0]
    return made_of.startswith("dot_general") or (labels != "" and not re.search(r"\d", labels))


def _library_work(call: Instruction, shapes: list[Shape]) -> HeavyWork:
    target = call.custom_call_target
    result = next(call.shape.leaves(), None)
    if result is None or len(shapes) < 2:
        return HeavyWork()
    if target.startswith(_MATMUL_TARGETS):
        config = call.backend_config.get("gemm_backend_config", {})
        numbers = config.get("dot_dimension_numbers", {})
        contracted = [int(d) for d in numbers.get("lhs_contracting_dimensions", ())]
        flops = _dot_flops(result, shapes[0], contracted or [len(shapes[0].dims) - 1])
        return HeavyWork(1, 0, flops, shapes[0].dtype, is_library_matmul=True)
    if target.startswith(_CONVOLUTION_TARGETS):
        output, kernel = result, shapes[1]
        if target.startswith("__cudnn$convBackwardInput"):
            output = shapes[0]
        elif target.startswith("__cudnn$convBackwardFilter"):
            output, kernel = shapes[1], result
        flops = _convolution_flops(call, output, kernel)
        return HeavyWork(0, 1, flops, shapes[0].dtype, is_library_matmul=True)
    return HeavyWork()


def _dot_flops(result: Shape, left: Shape, contracted: list[int]) -> int:
    return 2 * result.size * math.prod(left.dims[d] for d in contracted if d < len(left.dims))


def _convolution_flops(convolution: Instruction, output: Shape, kernel: Shape) -> int:
    """Twice the output times the kernel elements that meet in one output element.

    Padding is not subtracted; zeros put in by dilating the input are.
    """
    labels = re.search(r"_([0-9a-z?]+)->", convolution.attributes.get("dim_labels", ""))
    place = labels.group(1).find("o") if labels else -1
    features = kernel.dims[place] if 0 <= place < len(kernel.dims) else 1
    dilation = re.search(r"lhs_dilate=([\dx]+)", convolution.attributes.get("window", ""))
    zeros = math.prod(int(d) for d in dilation.group(1).split("x")) if dilation else 1
    return 2 * output.size * (kernel.size // max(1, features)) // zeros


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
