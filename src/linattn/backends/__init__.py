"""Who computes: the compiled core first, the array backend for what it declines.

LINATTN_BACKEND=array leaves the core out; LINATTN_BACKEND=native makes a call that it declines an
error. Both are for tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from . import array, native

__all__ = ["absorb", "attend", "declined", "query", "serving", "step", "using"]

_only: str | None = None  # "array", "native", or None: both


def attend(*args: Any) -> Any:
    result = native.attend(*args)
    return _array("attend", *args) if result is None else result


def absorb(*args: Any) -> None:
    if native.absorb(*args) is None:
        _array("absorb", *args)


def query(*args: Any) -> Any:
    result = native.query(*args)
    return _array("query", *args) if result is None else result


def step(*args: Any) -> Any:
    result = native.step(*args)
    return _array("step", *args) if result is None else result


def serving() -> str:
    """The backend that answers first: "native" or "array"."""
    return "array" if _only == "array" or native.extension is None else "native"


@contextmanager
def using(name: str | None) -> Iterator[None]:
    """Only "array" or only "native" within the block; None: as usual."""
    before = _only
    _choose(name)
    try:
        yield
    finally:
        _choose(before)


def declined(verb: str) -> None:
    """Called before another backend answers in the core's place."""
    if _only == "native":
        raise RuntimeError(f"linattn's compiled core declined {verb}, and LINATTN_BACKEND=native")


def _array(verb: str, *args: Any) -> Any:
    declined(verb)
    return getattr(array, verb)(*args)


def _choose(name: str | None) -> None:
    global _only
    if name not in (None, "array", "native"):
        raise ValueError(f"LINATTN_BACKEND: expected 'array' or 'native', got {name!r}")
    if name == "native" and native.extension is None:
        raise ImportError(
            f"LINATTN_BACKEND=native, and linattn's compiled core is missing ({native.reason}); "
            f"{native.REMEDY}"
        )
    _only = name
    if name == "array":
        native.use("declined")
    else:
        native.use("native" if native.extension is not None else "missing")


if os.environ.get("LINATTN_BACKEND"):
    _choose(os.environ["LINATTN_BACKEND"])
