"""How much memory does a call take beyond its inputs and its output, and does it grow with n?

Each number is the peak of a process of its own, less what it held before the call; inputs and
output are touched before. Nothing is warmed up: threads, scratch and pages of code count.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from _common import D, Options, Report, at_most, options, parser, textbook

from linattn import linear_attention, plan, softmax_attention

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident(key: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    for line in STATUS.read_text("utf-8").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) << 10
    raise OSError(f"{STATUS} has no {key}")


def peak() -> int:
    """The most memory that this process ever held, in bytes."""
    if STATUS.exists():
        return resident("VmHWM")
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


def child(case: dict[str, Any]) -> None:
    """Run one case in this process and print the bytes it took."""
    heads, n = case["heads"], case["n"]
    rng = np.random.default_rng(0)
    arrays = [np.empty((heads, n, D), case["dtype"]) for _ in range(4)]
    for x in arrays:  # block by block: what fills them must not hide what the call takes
        for rows in np.split(x.reshape(-1, D), range(512, heads * n, 512)):
            rows[...] = rng.standard_normal(rows.shape, dtype=np.float32)
    q, k, v, out = arrays
    try:
        CLEAR.write_text("5", "utf-8")  # the peak is now what is held
    except OSError:  # not Linux, or not allowed: the peak so far stands in for it
        pass
    before = peak()
    how = case["how"]
    if how == "textbook":
        out[...] = textbook(q, k, v)
    elif how == "softmax":
        softmax_attention(q, k, v, out=out)
    else:
        linear_attention(q, k, v, causal=how == "causal", out=out)
    print(json.dumps(peak() - before))


def measured(**case: Any) -> int:
    command = [sys.executable, __file__, "--case", json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return int(json.loads(done.stdout.splitlines()[-1]))


def measure(report: Report, o: Options) -> None:
    n = 512 if o.quick else 8192
    mebi = 1 << 20
    threads = report.machine.threads
    for heads, dtype, how in (
        (1, "float32", "full"),
        (1, "float32", "causal"),
        (8, "float32", "full"),
        (8, "float32", "causal"),
        (1, "float16", "full"),
        (1, "float16", "causal"),
    )[: 2 if o.quick else None]:
        report.heading(f"{how}, {heads} x n, {dtype}, {threads} threads")
        few, many = (
            [measured(heads=heads, n=m, how=how, dtype=dtype) for _ in range(1 if o.quick else 3)]
            for m in (n, 16 * n)
        )
        most = plan(n, n, D, batch=heads, causal=how == "causal", threads=threads).peak_bytes
        data: dict[str, Any] = {"heads": heads, "how": how, "dtype": dtype}
        for m, got in ((n, few), (16 * n, many)):
            report.row(
                f"{how}, {heads} x {m:,}", [b / mebi for b in got], "MiB", at_most(most / mebi),
                f"inputs and output: {4 * heads * m * D * np.dtype(dtype).itemsize >> 20} MiB",
                n=m, **data,
            )  # fmt: skip
        more = (min(many) - min(few)) / mebi
        report.row(f"{how}, {heads} x n: growth to 16 n", more, "MiB", at_most(0.25), **data)
    report.heading("for comparison")
    for how in ("textbook", "softmax"):
        held = measured(heads=1, n=n, how=how, dtype="float32") / mebi
        what = "the textbook" if how == "textbook" else "our softmax_attention, blockwise"
        report.row(f"{what}, 1 x {n:,}", held, "MiB", n=n, heads=1, how=how, dtype="float32")
    scores = n * n * 4 / mebi
    report.row(f"the n x n scores of the usual softmax, 1 x {n:,}", scores, "MiB")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.case is not None:
        child(given.case)
        return
    o = options(given)
    report = Report("memory", __doc__, o)
    if sys.platform == "win32":
        report.note("skipped: Windows tells no peak by the standard library")
    else:
        measure(report, o)
    report.finish()


if __name__ == "__main__":
    main()
