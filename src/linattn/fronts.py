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


def front(value: Any) -> Any:
    """The front end that serves this value, an array or a dtype; None for NumPy's and all others.

    A class counts as its library's where it or one of its bases was defined there. What is found is
    not remembered, though it would save a microsecond: torch.compile would see what it traced
    change, and trace once more or, where the front end is first met in a trace, fail.
    """
    for base in type(value).__mro__:
        library = base.__module__.partition(".")[0]
        if library in FRONTS:
            return FRONTS[library]()
    return None
