"""How much memory does a call take beyond its inputs and its output, and does it grow with n?

Each number is the peak of a process of its own, less what it held before the call; inputs and
output are touched before. Nothing is warmed up: threads, scratch and pages of code count.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from _common import (
    MEBI,
    NO_PEAK,
    D,
    Options,
    Report,
    apart,
    at_most,
    forget_peak,
    peak,
    run,
    textbook,
)

from linattn import linear_attention, plan, softmax_attention


def child(_: Options, case: dict[str, Any]) -> int:
    """The bytes that a case takes in this process."""
    heads, n = case["heads"], case["n"]
    rng = np.random.default_rng(0)
    arrays = [np.empty((heads, n, D), case["dtype"]) for _ in range(4)]
    for x in arrays:  # block by block: what fills them must not hide what the call takes
        for rows in np.split(x.reshape(-1, D), range(512, heads * n, 512)):
            rows[...] = rng.standard_normal(rows.shape, dtype=np.float32)
    q, k, v, out = arrays
    before = forget_peak()
    how = case["how"]
    if how == "textbook":
        out[...] = textbook(q, k, v)
    elif how == "softmax":
        softmax_attention(q, k, v, out=out)
    else:
        linear_attention(q, k, v, causal=how == "causal", out=out)
    return peak() - before


def measure(report: Report, o: Options) -> None:
    if sys.platform == "win32":
        report.note(NO_PEAK)
        return

    def measured(**case: Any) -> int:
        return int(apart(__file__, case, o))

    n = 512 if o.quick else 8192
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
                f"{how}, {heads} x {m:,}", [b / MEBI for b in got], "MiB", at_most(most / MEBI),
                f"inputs and output: {4 * heads * m * D * np.dtype(dtype).itemsize >> 20} MiB",
                n=m, **data,
            )  # fmt: skip
        more = (min(many) - min(few)) / MEBI
        report.row(f"{how}, {heads} x n: growth to 16 n", more, "MiB", at_most(0.25), **data)
    report.heading("for comparison")
    for how in ("textbook", "softmax"):
        held = measured(heads=1, n=n, how=how, dtype="float32") / MEBI
        what = "the textbook" if how == "textbook" else "our softmax_attention, blockwise"
        report.row(f"{what}, 1 x {n:,}", held, "MiB", n=n, heads=1, how=how, dtype="float32")
    scores = n * n * 4 / MEBI
    report.row(f"the n x n scores of the usual softmax, 1 x {n:,}", scores, "MiB")


if __name__ == "__main__":
    run("memory", __doc__, measure, child=child)
