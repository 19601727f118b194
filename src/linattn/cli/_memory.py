"""The peak of a process's memory during one call: a process of its own that does nothing else.

Every allocation counts, by whomever it is made: NumPy, its BLAS, our core, Python. The figure is

    peak of resident memory during the call - resident memory before it - bytes of the output

The inputs are there before. A small matrix product goes first, so that the buffers and the code of
the BLAS don't count; nothing of linattn goes first, so that its threads and its workspace do.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from . import _measure

__all__ = ["main", "peak"]


def main() -> None:
    work = json.loads(sys.argv[1])
    measured = peak(work["kind"], work["n"], work["d"], work["feature_map"])
    print("unknown" if measured is None else measured)


def peak(kind: str, n: int, d: int, feature_map: str) -> int | None:
    q, k, v = _measure.arrays([(n, d)] * 3, np.float32)
    call = _measure.calls(q, k, v, feature_map)[kind]
    small = q[:64].copy()
    for _ in range(2):
        np.exp(-abs(small @ small.T))
    before = _reset()
    if before is None:
        return None
    out = call()
    after = _highest()
    return None if after is None else max(0, after - before - out.nbytes)


def _reset() -> int | None:
    """Resident memory now; where the system can, its peak is set to that."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        return _status("VmRSS")
    except OSError:
        # The inputs were made last and without temporary arrays: the peak so far is now.
        return _highest()


def _highest() -> int | None:
    try:
        return _status("VmHWM")
    except OSError:
        pass
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


def _status(name: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    raise OSError(f"no {name} in /proc/self/status")
