"""One row per policy: it enrols the policy in every suite that shares the table.

A row declares what its policy promises, so that no test needs to know which policy it is testing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from remat.policies import (
    Auto,
    Checkmate,
    Dtr,
    Echo,
    Full,
    Gist,
    Ilp,
    LowMemory,
    MinCut,
    Monet,
    Names,
    Policy,
    Revolve,
    SaveAll,
    Sublinear,
)

__all__ = ["POLICY_TABLE", "PolicyRow", "cuts", "rows"]


@dataclass(frozen=True)
class PolicyRow:
    """A policy and what it promises.

    Attributes:
        id: how tests are named after it.
        registered: its name in `remat.policies.POLICIES`, which makes it in its default configuration.
        factory: makes it.
        exact: its decision is optimal for its own objective and comes with a certificate.
        recomputes_nothing: no operator runs twice.
        label_free: its decision does not depend on how the graph is numbered.
    """

    id: str
    registered: str
    factory: Callable[[], Policy]
    exact: bool = False
    recomputes_nothing: bool = False
    label_free: bool = True


POLICY_TABLE: tuple[PolicyRow, ...] = (
    PolicyRow("save_all", "save_all", SaveAll, recomputes_nothing=True),
    PolicyRow("full", "full", Full),
    PolicyRow("names", "names", Names),
    PolicyRow("names-first", "names", lambda: Names(("first", "second"))),
    PolicyRow("min_cut", "min_cut", MinCut, exact=True),
    PolicyRow("min_cut-paper", "min_cut", MinCut.paper, exact=True),
    PolicyRow(
        "min_cut-roofline", "min_cut", lambda: MinCut(heavy="roofline", random="cheap"), exact=True
    ),
    PolicyRow("low_memory", "low_memory", LowMemory, exact=True),
    PolicyRow("sublinear", "sublinear", Sublinear, label_free=False),
    PolicyRow("sublinear-sqrt", "sublinear", lambda: Sublinear("sqrt"), label_free=False),
    PolicyRow(
        "sublinear-recursive", "sublinear", lambda: Sublinear("recursive", 1), label_free=False
    ),
    PolicyRow("sublinear-cheap", "sublinear", lambda: Sublinear("cheap"), label_free=False),
    PolicyRow("revolve", "revolve", Revolve, label_free=False),
    PolicyRow("echo", "echo", Echo, label_free=False),
    PolicyRow("dtr", "dtr", Dtr, label_free=False),
    PolicyRow("dtr-banish", "dtr", lambda: Dtr("lru", "banish"), label_free=False),
    PolicyRow("checkmate", "checkmate", Checkmate, label_free=False),
    PolicyRow("ilp", "ilp", Ilp, label_free=False),
    PolicyRow("monet", "monet", Monet, label_free=False),
    PolicyRow("gist", "gist", Gist),
    PolicyRow("auto", "auto", Auto),
)


def rows(choose: Callable[[PolicyRow], bool] = lambda row: True) -> pytest.MarkDecorator:
    """Returns the `parametrize` mark of the rows that `choose` accepts; the argument is `row`."""
    chosen = [pytest.param(row, id=row.id) for row in POLICY_TABLE if choose(row)]
    return pytest.mark.parametrize("row", chosen)


def cuts() -> pytest.MarkDecorator:
    """Returns the mark of the rows whose policies are exact."""
    return rows(lambda row: row.exact)
