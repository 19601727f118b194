"""Whose front end serves a value: found by its type, and imported when one is first met.

NumPy's arrays need none. What comes of another library is served by the package that stands here
beside its name; the library itself is never imported from the core. An import is a statement that
hands on what it brought, and no call by name or entry in a register, because torch.compile follows
the one and not the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["FRONTS", "front"]


def _torch() -> Any:
    from .torch import front

    return front


FRONTS: dict[str, Callable[[], Any]] = {"torch": _torch}  # a library, and its front end

_of_type: dict[type, Any] = {}  # None: served here, or by nobody


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
            found = FRONTS[library]()
            break
    _of_type[kind] = found
    return found
