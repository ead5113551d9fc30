"""How often a loop of an HLO module runs, by what the compiler wrote down or by its condition."""

from __future__ import annotations

from collections.abc import Mapping

from remat.compiler.hlo import Computation, Instruction, Module

_SAME_VALUE = frozenset({"copy", "convert", "bitcast", "reshape", "optimization-barrier"})
_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE", "EQ": "EQ"}

Linear = tuple[int | None, int]
"""Loop variable (its place in the loop's tuple; None: none) plus a constant."""


def known_trip_count(loop: Instruction) -> int | None:
    """The trip count that the compiler attached to a ``while``, if it did."""
    record = loop.backend_config.get("known_trip_count")
    return int(record["n"]) if isinstance(record, dict) and "n" in record else None


def derived_trip_count(module: Module, where: Computation, loop: Instruction) -> int | None:
    """The trip count of a counting loop, read off its start, step and condition.

    Args:
        module: that the loop is in.
        where: the computation that contains the loop.
        loop: a ``while`` instruction.

    Returns:
        The number of times its body runs, or None if it does not count in constant steps from a
        constant to a constant.
    """
    condition = module.computations[loop.called("condition")[0]]
    body = module.computations[loop.called("body")[0]]
    compared = _comparison(module, condition)
    if compared is None:
        return None
    variable, limit, direction = compared
    start = _member(module, where, where.by_name[loop.operands[0]], variable)
    step = _member(module, body, body.root, variable)
    if start is None or start[0] is not None or step is None or step[0] != variable:
        return None
    return _count(start[1], limit, step[1], direction)


def _count(start: int, limit: int, step: int, direction: str) -> int | None:
    if direction == "NE":
        runs, rest = divmod(limit - start, step) if step else (0, 1)
        return runs if rest == 0 and runs >= 0 else None
    upward = direction in ("LT", "LE")
    if direction not in _MIRRORED or direction == "EQ" or step == 0 or upward != (step > 0):
        return None
    distance = (limit - start) if upward else (start - limit)
    distance += direction in ("LE", "GE")
    return max(0, -(-distance // abs(step)))


def _comparison(module: Module, condition: Computation) -> tuple[int, int, str] | None:
    """Loop variable, limit and direction of a condition of the form ``variable < limit``."""
    found = _find_compare(module, condition, {})
    if found is None:
        return None
    left, right, direction = found
    if left[0] is None:
        left, right, direction = right, left, _MIRRORED.get(direction, "EQ")
    if left[0] is None or right[0] is not None:
        return None
    return left[0], right[1] - left[1], direction


def _find_compare(
    module: Module, computation: Computation, known: Mapping[str, Linear]
) -> tuple[Linear, Linear, str] | None:
    root = computation.root
    if root.opcode in ("fusion", "call"):
        inner = _callee(module, root)
        return _find_compare(module, inner, _bind(module, computation, root, inner, known))
    if root.opcode != "compare":
        return None
    sides = [_linear(module, computation, name, known) for name in root.operands]
    if sides[0] is None or sides[1] is None:
        return None
    return sides[0], sides[1], root.attributes.get("direction", "")


def _member(module: Module, where: Computation, whole: Instruction, index: int) -> Linear | None:
    """Member `index` of a tuple that is built by a ``tuple`` instruction."""
    if whole.opcode != "tuple" or index >= len(whole.operands):
        return None
    return _linear(module, where, whole.operands[index], {})


def _linear(
    module: Module, where: Computation, name: str, known: Mapping[str, Linear]
) -> Linear | None:
    """A scalar as loop variable plus constant, or None if it is anything else."""
    if name in known:
        return known[name]
    instruction = where.by_name[name]
    if instruction.opcode == "constant":
        return (None, int(instruction.payload)) if _is_integer(instruction.payload) else None
    if instruction.opcode == "get-tuple-element":
        source = where.by_name[instruction.operands[0]]
        is_loop_state = source.opcode == "parameter"
        return (int(instruction.attributes["index"]), 0) if is_loop_state else None
    if instruction.opcode in _SAME_VALUE:
        return _linear(module, where, instruction.operands[0], known)
    if instruction.opcode in ("fusion", "call"):
        inner = _callee(module, instruction)
        bound = _bind(module, where, instruction, inner, known)
        return _linear(module, inner, inner.root.name, bound)
    if instruction.opcode in ("add", "subtract"):
        return _sum(module, where, instruction, known)
    return None


def _sum(
    module: Module, where: Computation, instruction: Instruction, known: Mapping[str, Linear]
) -> Linear | None:
    left, right = (_linear(module, where, name, known) for name in instruction.operands)
    if left is None or right is None:
        return None
    if instruction.opcode == "subtract":
        return (left[0], left[1] - right[1]) if right[0] is None else None
    if left[0] is not None and right[0] is not None:
        return None
    return left[0] if left[0] is not None else right[0], left[1] + right[1]


def _callee(module: Module, caller: Instruction) -> Computation:
    return module.computations[(caller.called("calls") or caller.called("to_apply"))[0]]


def _bind(
    module: Module,
    where: Computation,
    caller: Instruction,
    inner: Computation,
    known: Mapping[str, Linear],
) -> dict[str, Linear]:
    """What the parameters of a called computation are, as far as they are linear."""
    bound: dict[str, Linear] = {}
    for number, parameter in inner.parameters.items():
        value = _linear(module, where, caller.operands[number], known)
        if value is not None:
            bound[parameter.name] = value
    return bound


def _is_integer(text: str) -> bool:
    return text.lstrip("-").isdigit()
