"""Fixtures of all test modules."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before NumPy is imported: threads of its own that spin after each small product of the oracle
# make the tests many times slower where several run at once.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).parent))  # for `import cases`

import cases


@pytest.fixture(params=cases.BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each backend in turn: "array", then every instruction set that core and machine have."""
    with cases.using(request.param):
        yield request.param
