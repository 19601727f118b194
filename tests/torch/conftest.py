"""Fixtures of the tests of the torch front end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from linattn import backends
from linattn.backends import native


@pytest.fixture(params=["native", "composite"])
def road(request: pytest.FixtureRequest) -> Iterator[str]:
    """Who computes on a CPU: the compiled core, or torch operations, as on other devices."""
    if request.param == "native" and native.extension is None:
        pytest.skip("there is no compiled core")
    with backends.using("native" if request.param == "native" else "array"):
        yield request.param
