"""What XLA fuses: which instances are buffers, and which kernels read them.

A result of a matmul, convolution, loop, scatter or unknown operator is a buffer; so is a reduction's (it is merged
with what it reads, and with what reads it in kernels of rows alone, `rows.py`), what these operators read, what a
barrier ties, and every result and gradient: the rule of `remat.core.buffers`, for every run. Any other value is a
buffer if XLA's `priority_fusion` leaves it (`remat.core.priority_fusion`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from remat.core.buffers import is_written, makes_operands
from remat.core.kernel_work import CYCLE_BYTES, blocks_of, times_read
from remat.core.priority_fusion import Program, fuse
from remat.memory.execution import Execution, Node, live_nodes, users_of
from remat.memory.rows import Rows
from remat.memory.splits import is_reshaped
from remat.memory.tables import MATMULS_ADD_ARRAYS, OF_SEVERAL

__all__ = ["Fusion"]

# What XLA fuses with readers, but not into a matmul's kernel.
_APART = frozenset({"dynamic_slice", "gather"})


class Fusion:
    """Which instances become buffers, and which kernels read them.

    Attributes:
        live: for every node whether a result depends on it.
        users: for every instance the live nodes that read it.
        is_buffer: for every instance whether it is written to memory.
        kernels: for every node the kernels it is part of, each by its last node.
        reads: for every instance the bytes of the buffers that it is made of; of a buffer its own.
        in_matmuls: the nodes that a matmul's own kernel computes behind its product.
        within: matmuls, and what is in their kernels, of which nothing is written: another array is added first.
        rows: the kernels that reduce rows in themselves, each by its last node.

    Args:
        joined: matmuls that are multiplied as one with others.
    """

    def __init__(self, execution: Execution, joined: AbstractSet[int] = frozenset()) -> None:
        self.execution = execution
        self.live = live_nodes(execution)
        self.users = users_of(execution, self.live)
        self.is_buffer = [i.producer < 0 for i in execution.instances]
        self.kernels: list[frozenset[int]] = [frozenset()] * len(execution.nodes)
        self.reads: list[float] = [float(i.nbytes) for i in execution.instances]
        self._results = set(execution.results)
        self._bent = self._seen_reshaped()
        self._inside, self._operands = self._taken_in()
        self._rows = Rows(execution, self.users)
        self.in_matmuls: set[int] = set()
        self.within: set[int] = set()
        self._sums: set[int] = set()  # what their kernels write
        self._beside: set[tuple[int, int]] = set()  # by reader, what they read beside the product
        self._find_ends_of_matmuls(joined)
        self._choose()

    def _choose(self) -> None:
        nodes = self.execution.nodes
        ends = [runs and self._ends(number) for number, runs in enumerate(self.live)]
        stays = {number for number, end in enumerate(ends) if end and self._stays(number)}
        runs = [*self.live]
        for number in sorted(self._inside, reverse=True):
            # What matmuls alone read, and each of them makes itself, is no kernel.
            runs[number] = ends[number] or any(
                runs[user] for user in self._others(number, nodes[number].outs)
            )
        for number in itertools.chain(*self._rows.diamonds.values()):
            runs[number] = False
        sums = self._sums_of_rows(runs)
        in_any_case = [end and n not in stays and n not in sums for n, end in enumerate(ends)]
        self._fused = fuse(self._program(runs, stays, sums), runs, in_any_case)
        self.rows = self._fused.rows
        in_memory = [w and n not in self.within for n, w in enumerate(self._fused.written)]
        for number in range(len(nodes) - 1, -1, -1):
            if not self.live[number]:
                continue
            node = nodes[number]
            if in_memory[number]:
                self.kernels[number] = frozenset((number,))
                if number in self._fused.made_again:
                    taking = {user for user, _ in self._operands.get(number, ())}
                    self.kernels[number] |= self._union(self._whole_readers(number)) - taking
                for out in node.outs:
                    self.is_buffer[out] = True
            else:
                self.kernels[number] = self._union(self._readers(node.outs))
        for number, node in enumerate(nodes):
            if self.live[number] and not in_memory[number]:
                read = sum(self.reads[index] for index in node.ins)
                for out in node.outs:
                    self.reads[out] = read

    def _sums_of_rows(self, runs: Sequence[bool]) -> set[int]:
        """Reductions of rows that kernels of rows may take in, or make part of others: nothing else needs them."""
        return {
            number
            for number in (self._rows.sums if self._rows.diamonds else ())
            if runs[number] and not self._ends(number, of_rows=True)
        }

    def _ends(self, number: int, *, of_rows: bool = False) -> bool:
        """Whether a node's results are in memory in any case; `of_rows`: but for a reduction's."""
        node = self.execution.nodes[number]
        readers = self._readers(node.outs)
        return (
            not readers
            or not self._results.isdisjoint(node.outs)
            or number in self._operands
            or number in self._sums
            or is_written(
                not node.fusible or (node.reduces and not of_rows),
                self._apart_from(node.outs, self._others(number, node.outs)),
            )
        )

    def _stays(self, number: int) -> bool:
        """Whether a node's results are in memory only as matmuls read them that see them in another shape."""
        node, readers = self.execution.nodes[number], self._whole_readers(number)
        taking = self._operands.get(number, set[tuple[int, int]]())
        bent = self._bent.intersection((user, out) for out in node.outs for user in self.users[out])
        return (
            node.fusible
            and not node.reduces
            and bool(readers)
            and bool(bent or taking)
            and number not in self._inside
            and number not in self.in_matmuls
            and taking <= self._bent
            and self._results.isdisjoint(node.outs)
            and not is_written(False, self._apart_from(node.outs, readers))
        )

    def _whole_readers(self, number: int) -> list[int]:
        """The readers of a node's results that see them in their own shape, and run besides matmuls' kernels."""
        return [
            user
            for out in self.execution.nodes[number].outs
            for user in self.users[out]
            if (user, out) not in self._bent
            and (user not in self._inside or self._others(user, self.execution.nodes[user].outs))
        ]

    def _seen_reshaped(self) -> set[tuple[int, int]]:
        """The matmuls that see an operand in another shape, each with that operand.

        Between the operand and such a matmul XLA has a bitcast, and those it does not ask whether what makes the
        operand can be merged into all that read it (`CanFuseWithAllNonBitcastUsers`).
        """
        values = self.execution.graph.values
        found: set[tuple[int, int]] = set()
        for number, node in enumerate(self.execution.nodes):
            if not self.live[number] or node.op is None or not node.op.contracts:
                continue
            if number in self.execution.sums:
                found.update((number, index) for index in node.ins)
            elif len(node.ins) == len(node.op.inputs):
                for side, (index, value) in enumerate(zip(node.ins, node.op.inputs, strict=True)):
                    if is_reshaped(node.op, side, len(values[value].shape)):
                        found.add((number, index))
        return found

    def _elements_read(self, index: int) -> int:
        """The elements of the largest array in memory that an instance is made of: of a spread number, one."""
        nodes, instances = self.execution.nodes, self.execution.instances
        most, queue, seen = 0, [index], {index}
        for found in queue:
            producer = instances[found].producer
            if producer < 0 or not nodes[producer].fusible or nodes[producer].reduces:
                most = max(most, instances[found].elements)
                continue
            new = [i for i in nodes[producer].ins if i not in seen]
            seen.update(new)
            queue += new
        return most

    def _find_ends_of_matmuls(self, joined: AbstractSet[int]) -> None:
        """Finds the nodes that end a matmul's own kernel: what its product alone is made into, element by element.

        Other arrays that they read are numbers, rows that are added to each, or arguments (`gemm_fusion`), and of
        jax 0.12 on all that is not made element by element; what is seen otherwise, without a copy, is the same
        product. Of matmuls that are `joined` each product is part of another.
        """
        users, sources = self.users, self.execution.sources
        instances = self.execution.instances
        for number, matmul in enumerate(self.execution.nodes):
            if not self.live[number] or matmul.op is None or not matmul.op.contracts:
                continue
            if len(matmul.outs) != 1 or number in self.execution.sums or number in joined:
                continue
            (index,) = matmul.outs
            elements = instances[index].elements
            chain: list[int] = []
            adds_array = False
            while len(users[index]) == 1 and index not in self._results:
                (user,) = users[index]
                node = self.execution.nodes[user]
                if node.op is not None and node.op.kind == "VIEW" and len(node.outs) == 1:
                    (index,) = node.outs
                    continue
                if node.op is None or node.op.kind != "POINTWISE" or not node.fusible:
                    break
                if user in self.in_matmuls:
                    break  # the other product takes it
                others = [i for i in node.ins if i != index and i not in sources]
                read = {i: self._elements_read(i) for i in others}
                added = [i for i in others if MATMULS_ADD_ARRAYS and read[i] > 1]
                given = [i for i in node.ins if i != index and i in sources]
                whole = [i for i in others if read[i] >= elements]
                if not all(map(self._is_apart, whole)):
                    break
                if len(node.outs) != 1 or instances[node.outs[0]].elements != elements:
                    break
                chain.append(user)
                adds_array = adds_array or bool(whole)
                self._beside.update((user, i) for i in (*added, *given))
                (index,) = node.outs
            self.in_matmuls.update(chain)
            if adds_array:
                self.within.update((number, *chain[:-1]))
                self._sums.add(chain[-1])

    def _is_apart(self, index: int) -> bool:
        """Whether a matmul's kernel may add an array that is no argument to its product: it is made before."""
        if not MATMULS_ADD_ARRAYS:
            return False
        nodes, instances = self.execution.nodes, self.execution.instances
        producer = instances[instances[index].root].producer
        node = nodes[producer] if producer >= 0 else None
        return (
            node is None
            or not node.fusible
            or node.reduces
            or node.name in _APART
            or producer in self.in_matmuls
        )

    def _taken_in(self) -> tuple[dict[int, set[int]], dict[int, set[tuple[int, int]]]]:
        """What matmuls compute in their own kernels, and the operators whose results these then read.

        By operator the matmuls that make its results themselves, and those that read them with their operand.
        XLA's `gemm_fusion` takes in what makes one array of one that is no larger, element by element, each matmul
        for itself (`IsInputWorthFusing`; what an operator reads besides is a number).
        """
        nodes, instances = self.execution.nodes, self.execution.instances
        inside: dict[int, set[int]] = {}
        operands: dict[int, set[tuple[int, int]]] = {}
        for matmul, node in enumerate(nodes):
            if not self.live[matmul] or node.op is None or not node.op.contracts:
                continue
            for index in node.ins:
                producer = last = instances[index].producer
                while producer >= 0 and self._is_taken_in(producer):
                    inside.setdefault(producer, set()).add(matmul)
                    producer = instances[nodes[producer].ins[0]].producer
                if producer >= 0 and producer != last:
                    operands.setdefault(producer, set()).add((matmul, index))
        return inside, operands

    def _is_taken_in(self, number: int) -> bool:
        nodes, instances = self.execution.nodes, self.execution.instances
        node = nodes[number]
        if node.op is None or node.op.kind != "POINTWISE" or not node.fusible:
            return False
        if len(node.ins) != 1 or len(node.outs) != 1 or node.name in OF_SEVERAL:
            return False
        read, made = instances[node.ins[0]], instances[node.outs[0]]
        if {node.name, nodes[read.producer].name if read.producer >= 0 else ""} == {"min", "max"}:
            return False  # both are one operator of three arrays
        return read.elements == made.elements and read.nbytes <= made.nbytes

    def _others(self, number: int, outs: Sequence[int]) -> list[int]:
        """The readers of a node's results that do not make them themselves."""
        matmuls = self._inside.get(number, ())
        return [user for user in self._readers(outs) if user not in matmuls]

    def _program(
        self, runs: Sequence[bool], stays: AbstractSet[int], sums: AbstractSet[int]
    ) -> Program:
        nodes, instances = self.execution.nodes, self.execution.instances
        readers = list(self.users)
        for number in self._inside:
            for index in (*nodes[number].ins, *nodes[number].outs):
                producer = instances[index].producer
                users = self._others(producer, (index,)) if producer >= 0 else readers[index]
                readers[index] = [user for user in users if runs[user]]
        for number in stays:
            for out in nodes[number].outs:
                readers[out] = [user for user in readers[out] if (user, out) not in self._bent]
        for root, inner in self._rows.diamonds.items():
            for index in itertools.chain(*(nodes[number].ins for number in inner)):
                readers[index] = [root, *(n for n in readers[index] if n not in (root, *inner))]
        return Program(
            outs=[node.outs for node in nodes],
            ins=[node.ins for node in nodes],
            readers=readers,
            nbytes=[instance.nbytes for instance in instances],
            work=[node.cycles * self.size(n) * CYCLE_BYTES for n, node in enumerate(nodes)],
            moves=[node.op is None or node.op.kind != "POINTWISE" for node in nodes],
            blocks=[blocks_of(node.op, self.size(n)) for n, node in enumerate(nodes)],
            part=self._part,
            stays=stays,
            diamonds=self._rows.diamonds,
            rows={number: self._rows.count(number) for number in self._rows.diamonds},
            sums=sums,
            tiled=self._rows.tiled,
        )

    def _part(self, index: int, reader: int) -> float:
        """How often a reader takes an instance's elements: less than once if it takes a part of them.

        What ends a matmul's kernel costs nothing where it is read: it takes the product alone, which is that.
        """
        node, instances = self.execution.nodes[reader], self.execution.instances
        if (reader, index) in self._beside:
            return 0.0
        if node.op is None:
            return 1.0
        made = sum(instances[out].elements for out in node.outs)
        return times_read(node.op, instances[index].elements, made, first=node.ins[0] == index)

    def _apart_from(self, outs: Sequence[int], readers: Sequence[int]) -> list[Node]:
        """The readers that do not make a node's results in their own kernel."""
        nodes = self.execution.nodes
        return [
            node
            for node in map(nodes.__getitem__, readers)
            if node.op is None or not makes_operands(node.op, first=node.ins[0] in outs)
        ]

    def _readers(self, outs: Sequence[int]) -> list[int]:
        return [user for out in outs for user in self.users[out]]

    def _union(self, readers: Sequence[int]) -> frozenset[int]:
        """The kernels of some nodes; without a new set where there is one that holds the others."""
        found = self.kernels[readers[0]] if readers else frozenset[int]()
        for number in readers[1:]:
            other = self.kernels[number]
            if not other <= found:
                found = other if found <= other else found | other
        return found

    def pays(self, number: int, users: Sequence[int]) -> bool:
        """Whether XLA would make one kernel of two that writes the results of both; see `Fused.pays`."""
        return self._fused.pays(number, users)

    def is_read(self, index: int, kernel: int) -> bool:
        """Whether a kernel that needs an instance reads it from memory, and does not make it itself."""
        if not self.is_buffer[index]:
            return False
        producer = self.execution.instances[index].producer
        return producer not in self._fused.made_again or kernel not in self.kernels[producer]

    def size(self, number: int) -> int:
        """The number of elements a kernel walks over."""
        node, instances = self.execution.nodes[number], self.execution.instances
        around = node.ins if node.reduces else node.outs
        return max((instances[index].elements for index in around), default=0)
