"""What of an execution a result needs, and who reads what."""

from __future__ import annotations

from collections.abc import Sequence

from remat.memory.execution import Execution

__all__ = ["live_nodes", "users_of"]


def live_nodes(execution: Execution) -> list[bool]:
    """Returns for every node whether a result depends on it; XLA deletes the others."""
    nodes = execution.nodes
    live = [False] * len(nodes)
    needed = [False] * len(execution.instances)
    for index in execution.results:
        needed[index] = True
    for number in range(len(nodes) - 1, -1, -1):
        node = nodes[number]
        if not node.outs or any(needed[out] for out in node.outs):
            live[number] = True
            for index in node.ins:
                needed[index] = True
    return live


def users_of(execution: Execution, live: Sequence[bool]) -> list[list[int]]:
    """Returns for every instance the live nodes that read it, each once, ascending."""
    users: list[list[int]] = [[] for _ in execution.instances]
    for number, node in enumerate(execution.nodes):
        if live[number]:
            for index in dict.fromkeys(node.ins):
                users[index].append(number)
    return users
