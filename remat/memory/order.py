"""In which order XLA runs the kernels: of three orders the one that takes the least memory.

It follows XLA's `hlo_memory_scheduler`, which compares (`DefaultMemoryScheduler`)

- a list schedule: of all kernels whose operands are there, the next is the one that frees most beyond what it
  writes (`ListScheduler`). A result is never freed, so that the gradient of a weight waits until everything else
  takes more; in a loop's body it takes as much as the whole stack that it is written into. What is made of nothing
  (zeros that a scatter writes over) can run at once, and does when everything else takes more;
- a depth-first search from the results back that visits first what has most users above it
  (`DFSMemoryScheduler`), and
- one that visits operands as they stand (`PostOrderScheduler`).

In which order a kernel has its operands is known but roughly, so the last is the least exact. Of two that take the
same XLA takes the first.

Early is what is made from next to nothing (random bits, masks unpacked from bits): for all equal shapes in one
kernel, as early as the first of them, since XLA merges these across the whole program. The zeros that loops stack
into are made in one kernel for all of a type, too.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from remat.memory.execution import Execution, behind_operands
from remat.memory.fusion import Fusion
from remat.memory.identities import ArrayKind, array_kind
from remat.memory.kernels import Kernel, written_over
from remat.memory.tables import SMALL_SHARE

__all__ = ["made_early", "orders"]

_POINTER_BYTES = 8  # what a barrier makes: a pointer for everything that it ties


def orders(execution: Execution, kernels: Sequence[Kernel]) -> list[list[Kernel]]:
    """Returns the orders among which XLA chooses, the one that it prefers of equal ones first.

    Complexity: for the list schedule, of every buffer the square of the kernels that read it at most; the others
    are linear in the kernels and what they read.
    """
    program = _program_of(execution, kernels)
    found = (_list_schedule(program), _most_users_first(program), _as_they_stand(program))
    return [[kernels[number] for number in order] for order in found]


@dataclass(frozen=True)
class _Program:
    """Kernels by number, as a scheduler sees them.

    Attributes:
        operands: by kernel, those whose results it needs, in the order of its operands.
        users: by kernel, those that need it.
        reads: by kernel, the buffers that it reads, without what is there in any case.
        written: by kernel, the bytes of what it makes.
        sizes: by buffer, its bytes.
        kept: the buffers that are results, which nothing frees.
        scalar: by kernel, whether it makes numbers only: these run at once.
        ends: the kernels that make results, in the order of the results.
    """

    operands: list[list[int]]
    users: list[list[int]]
    reads: list[list[int]]
    written: list[int]
    sizes: dict[int, int]
    kept: frozenset[int]
    scalar: list[bool]
    ends: list[int]


def _program_of(execution: Execution, kernels: Sequence[Kernel]) -> _Program:
    instances = execution.instances
    kept = frozenset(instances[index].root for index in execution.results)
    shared = Counter(written_over(execution, kernels, kept).values())
    # What a loop's body hands on lies in a stack, and counts as all of it.
    times = execution.graph.multiplicity if execution.stacks else 1

    def bytes_of(root: int) -> int:
        return instances[root].nbytes * max(1, shared[root]) * (times if root in kept else 1)

    def written(kernel: Kernel) -> int:
        if execution.nodes[kernel.node].kind == "barrier":
            return _POINTER_BYTES * len(kernel.reads)
        return sum(map(bytes_of, kernel.writes))

    operands = _operands(execution, kernels)
    users: list[list[int]] = [[] for _ in kernels]
    for number, read in enumerate(operands):
        for other in read:
            users[other].append(number)
    for number, kernel in enumerate(kernels):
        if execution.nodes[kernel.node].kind == "barrier":
            users[number] = _behind_barrier(execution, kernels, number, users[number])
    maker = {root: number for number, kernel in enumerate(kernels) for root in kernel.writes}
    roots = (instances[index].root for index in execution.results)
    reads = [[root for root in k.reads if root not in execution.sources] for k in kernels]
    return _Program(
        operands=operands,
        users=users,
        reads=reads,
        written=[written(kernel) for kernel in kernels],
        sizes={root: bytes_of(root) for read in reads for root in read},
        kept=kept,
        scalar=[
            bool(k.writes) and all(instances[root].elements <= 1 for root in k.writes)
            for k in kernels
        ],
        ends=list(dict.fromkeys(maker[root] for root in roots if root in maker)),
    )


def _behind_barrier(
    execution: Execution, kernels: Sequence[Kernel], barrier: int, users: Sequence[int]
) -> list[int]:
    """The kernels that need a barrier, as they are ready: when XLA has taken all that they read out of its tuple.

    First what most of them read, of equals the last (`ListScheduler`).
    """
    instances = execution.instances
    tied = [instances[index].root for index in execution.nodes[kernels[barrier].node].ins]
    count = Counter(root for user in users for root in kernels[user].reads)
    order = sorted(range(len(tied)), key=lambda place: (-count[tied[place]], -place))
    turn = {tied[place]: at for at, place in enumerate(order)}
    return sorted(users, key=lambda u: max((turn.get(r, -1) for r in kernels[u].reads), default=-1))


def _operands(execution: Execution, kernels: Sequence[Kernel]) -> list[list[int]]:
    """By kernel, the kernels whose results it reads, in the order in which XLA has its operands.

    What is merged into a kernel leaves its place, and its own operands come last: breadth first from the kernel's
    last operators.
    """
    nodes, instances = execution.nodes, execution.instances
    home = {node: number for number, k in enumerate(kernels) for node in (k.node, *k.merged)}
    found: list[list[int]] = []
    for number, kernel in enumerate(kernels):
        order: dict[int, None] = {}
        for last in (kernel.node, *kernel.merged):
            queue, seen = [last], {last}
            for node in queue:
                for producer in (instances[index].producer for index in nodes[node].ins):
                    if producer in kernel.after:
                        order.setdefault(producer)
                    elif producer >= 0 and producer not in home and producer not in seen:
                        seen.add(producer)
                        queue.append(producer)
        order.update(dict.fromkeys(sorted(kernel.after)))
        read = dict.fromkeys(home[producer] for producer in order if producer in home)
        found.append([other for other in read if other != number])
    return found


def _list_schedule(program: _Program) -> list[int]:
    """The kernels, each time the one that frees most; of equal ones that with most users, then the latest ready."""
    waiting = [len(read) for read in program.operands]
    readers: dict[int, list[int]] = {}
    for number, read in enumerate(program.reads):
        for root in read:
            readers.setdefault(root, []).append(number)
    left = {root: len(found) + (root in program.kept) for root, found in readers.items()}

    def gain(number: int) -> float:
        if program.scalar[number]:
            return math.inf
        freed = sum(program.sizes[root] for root in program.reads[number] if left[root] == 1)
        return freed - program.written[number]

    heap: list[tuple[float, int, int, int]] = []
    ready: dict[int, tuple[float, int, int, int]] = {}

    turns = itertools.count()

    def push(number: int) -> None:
        ready[number] = (-gain(number), -len(program.users[number]), -next(turns), number)
        heapq.heappush(heap, ready[number])

    for number, count in enumerate(waiting):
        if not count:
            push(number)
    order: list[int] = []
    while heap:
        entry = heapq.heappop(heap)
        number = entry[3]
        if ready.get(number) != entry:
            continue  # it is in the heap again, with what it frees now
        del ready[number]
        order.append(number)
        last = [root for root in program.reads[number] if left[root] == 2]
        for root in program.reads[number]:
            left[root] -= 1
        for user in program.users[number]:
            waiting[user] -= 1
            if not waiting[user]:
                push(user)
        for other in {reader for root in last for reader in readers[root]} & ready.keys():
            if ready[other][0] != -gain(other):
                push(other)
    return order


def _most_users_first(program: _Program) -> list[int]:
    """Depth first from the results, what has most users above it first, then what took most memory to make.

    Both are sums over all paths, so of deep programs they reach their bounds: then what is made last comes first.
    """
    count = len(program.operands)
    ends = set(program.ends)
    others, taken = [0] * count, [0] * count
    total = 0
    for number in _as_they_stand(program):
        read = program.operands[number]
        users = len(program.users[number]) + (number in ends)
        total += program.written[number]
        others[number] = min(count, max(0, users - 1) + sum(others[other] for other in read))
        taken[number] = min(total, program.written[number] + sum(taken[other] for other in read))

    def sort(numbers: list[int]) -> list[int]:
        return sorted(numbers, key=lambda number: (-others[number], -taken[number], number))

    return behind_operands(
        [*sort(program.ends), *_unread(program)], lambda number: sort(program.operands[number])
    )


def _as_they_stand(program: _Program) -> list[int]:
    """Depth first from the results, operands in their order."""
    return behind_operands([*program.ends, *_unread(program)], program.operands.__getitem__)


def _unread(program: _Program) -> list[int]:
    return [number for number, users in enumerate(program.users) if not users]


def made_early(execution: Execution, fusion: Fusion) -> dict[int, int]:
    """Returns the buffers that are made before their turn, each with the node of the kernel that makes it.

    The zeros that loops stack their results into are made in one kernel for all of a type.
    """
    ready = [-1] * len(execution.instances)
    first: dict[tuple[int, int], int] = {}
    moved: dict[int, int] = {}
    filled: dict[ArrayKind, int] = {}
    for number, node in enumerate(execution.nodes):
        if not fusion.live[number]:
            continue
        known = max((ready[index] for index in node.ins), default=-1)
        for out in node.outs:
            instance = execution.instances[out]
            if _is_stack(execution, out):
                value = execution.graph.values[instance.value]
                start = filled.setdefault((value.dtype, value.shape), number)
                if start < number:
                    moved[out] = start
            if node.kind == "zeros" and node.ins:
                moved[out] = execution.instances[node.ins[0]].producer
            if node.kind == "barrier" or not node.fusible:
                ready[out] = number
                continue
            shape = (instance.elements, instance.nbytes)
            ready[out] = number if fusion.is_buffer[out] else known
            if not fusion.is_buffer[out] or node.reduces:
                continue
            read = sum(fusion.reads[index] for index in node.ins)
            if instance.elements > 1 and read <= SMALL_SHARE * instance.nbytes:
                start = first.setdefault(shape, number)
                if known <= start < number:
                    moved[out] = ready[out] = start
    return moved


def _is_stack(execution: Execution, index: int) -> bool:
    """Whether a planned loop stacks its results into an array, over zeros that only loops write over."""
    instance = execution.instances[index]
    node = execution.nodes[instance.producer] if instance.producer >= 0 else None
    if node is None or node.trips < 2:
        return False
    value = execution.graph.values[instance.value]
    return value.shape[:1] == (node.trips,) and array_kind(value) not in execution.shared
