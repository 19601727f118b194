"""Fixtures of all test modules."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before NumPy is imported: threads of its own that spin after each small product of the oracle
# make the tests many times slower where several run at once.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).parent))  # for `import cases`

# Where torch is missing, the folder tests/torch must not pass for it.
_torch = importlib.util.find_spec("torch")
if _torch is not None and _torch.origin is None:
    sys.modules["torch"] = None  # type: ignore[assignment]  # now an import of it fails

import cases  # noqa: E402

from linattn import backends  # noqa: E402


@pytest.fixture(params=cases.BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each backend in turn: "array", then every instruction set that core and machine have."""
    with cases.using(request.param):
        yield request.param


@pytest.fixture(params=["array", "native"])
def either_backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both in turn, and of the core the instruction set that it chose itself."""
    if request.param == "native" and backends.native.extension is None:
        pytest.skip(f"the compiled core is missing: {backends.native.reason}")
    with backends.using(request.param):
        yield request.param
