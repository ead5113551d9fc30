"""What all tests have in common: a Ctrl-C that a test presses itself fails that test, not the run."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest


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
