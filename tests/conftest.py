"""What all tests have in common: hypothesis profiles, marks, Ctrl-C.

`REMAT_HYPOTHESIS` chooses the profile of the properties: `quick` (without it) tries the same few examples every
time, `nightly` draws other ones each time, ten times as many, and prints how a failure is reproduced.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import settings

from remat.compiler.toolchain import find_plugin
from remat.compiler.tpu import is_tpu_compiler_there

settings.register_profile("quick", deadline=None, derandomize=True)
settings.register_profile("nightly", deadline=None, print_blob=True)
os.environ.setdefault("REMAT_CONFIRM", "off")  # tests that compile for a budget say so
settings.load_profile(os.environ.get("REMAT_HYPOTHESIS", "quick"))


@pytest.fixture(scope="session", autouse=True)
def any_width() -> None:
    """What commands print does not depend on the window that pytest tells its workers of."""
    os.environ.pop("COLUMNS", None)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a compiler that is missing; marks what `sample` leaves out."""
    missing = {}
    if find_plugin() is None:
        missing["gpu_compile"] = "XLA:GPU is not installed: pip install 'remat[deviceless]' (Linux)"
    if not is_tpu_compiler_there():
        missing["tpu_compile"] = "XLA:TPU is not installed: pip install 'jax[tpu]' (Linux)"
    for item in items:
        for mark, reason in missing.items():
            if item.get_closest_marker(mark) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
    sampled: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in sorted(items, key=lambda item: item.nodeid):  # plugins may have shuffled them
        if item.get_closest_marker("sample") is not None:
            sampled[item.nodeid.partition("[")[0]].append(item)
    for instances in sampled.values():
        mark = instances[0].get_closest_marker("sample")
        quick = min(mark.args[0], len(instances)) if mark else 0
        kept = {index * len(instances) // quick for index in range(quick)}
        for index, item in enumerate(instances):
            if index not in kept:
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Turns a KeyboardInterrupt that comes out of a test with the fixture `ctrl_c` into a failure.

    pytest would end, and take a worker of pytest-xdist with it.
    """
    try:
        return (yield)
    except KeyboardInterrupt:
        if "ctrl_c" not in pyfuncitem.fixturenames:
            raise
        pytest.fail("the Ctrl-C that the test pressed came out of what it tests")
