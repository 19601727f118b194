"""Whose front end serves a value: found by its type, and imported when one is first met.

NumPy's arrays need none. What comes of another library is served by the package named here, which
registers itself when it is imported; the library itself is never imported from here.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["FRONTS", "front", "named", "register"]

FRONTS = {"torch": "linattn.torch"}  # a library: the package that serves its arrays

_registered: dict[str, Any] = {}
_of_type: dict[type, Any] = {}  # None: served here, or by nobody


def register(library: str, front: Any) -> None:
    """Called by a front end when it is imported."""
    _registered[library] = front


def named(library: str) -> Any:
    """The front end of a library that is known to have one; imports both."""
    if library not in _registered:
        importlib.import_module(FRONTS[library])
    return _registered[library]


def front(value: Any) -> Any:
    """The front end that serves this value, an array or a dtype; None for NumPy's and all others.

    A class counts as its library's where it or one of its bases was defined there.
    """
    kind = type(value)
    if kind in _of_type:
        return _of_type[kind]
    found = None
    for base in kind.__mro__:
        library = base.__module__.partition(".")[0]
        if library in FRONTS:
            found = named(library)
            break
    _of_type[kind] = found
    return found
