"""What is in use, and how many threads."""

from __future__ import annotations

import os
from dataclasses import dataclass

from . import _check, backends
from .backends import native

__all__ = ["Config", "get_num_threads", "set_num_threads", "show_config"]

_threads: int | None = None  # remembered where there is no core to tell


@dataclass(frozen=True)
class Config:
    """What linattn runs on; printed by ``print``.

    backend:
        "native" (the compiled core) or "array"
    instruction_set, instruction_sets:
        the one in use and those the core was built with; None and () without it
    threads:
        threads a call may use
    remedy:
        how to get the compiled core where it is missing, else ""
    """

    version: str
    numpy: str
    backend: str
    instruction_set: str | None
    instruction_sets: tuple[str, ...]
    threads: int
    remedy: str

    def __str__(self) -> str:
        lines = [
            f"linattn          {self.version}",
            f"numpy            {self.numpy}",
            f"backend          {self.backend}",
            f"instruction set  {self.instruction_set or 'none: no compiled core'}"
            + (f" (of {', '.join(self.instruction_sets)})" if self.instruction_sets else ""),
            f"threads          {self.threads}",
        ]
        if self.remedy:
            lines.append(f"to get the fast one: {self.remedy}")
        return "\n".join(lines)


def show_config() -> Config:
    """What linattn runs on, as data that prints as a table.

    Examples
    --------
    >>> show_config().backend in ("native", "array")
    True
    """
    import numpy

    import linattn

    core = native.extension
    return Config(
        version=linattn.__version__,
        numpy=numpy.__version__,
        backend=backends.serving(),
        instruction_set=None if core is None else core.instruction_set(),
        instruction_sets=() if core is None else tuple(core.instruction_sets()),
        threads=get_num_threads(),
        remedy="" if core is not None else f"({native.reason}) {native.REMEDY}",
    )


def set_num_threads(n: int) -> None:
    """Let each call use up to n threads, the calling one included.

    Without it OMP_NUM_THREADS decides, then the CPUs this process may run on. The array backend
    computes through NumPy, whose own settings decide there.

    Raises
    ------
    TypeError, ValueError
        not an integer, or less than 1
    """
    global _threads
    n = _check.size("n", n, 1)
    if native.extension is not None:
        native.extension.set_num_threads(n)
    _threads = n


def get_num_threads() -> int:
    """The number of threads a call may use."""
    if native.extension is not None:
        return int(native.extension.get_num_threads())
    if _threads is not None:
        return _threads
    wanted = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
