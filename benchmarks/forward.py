"""How near is the full (not causal) forward pass to the matrix product, how far from the textbook?

Our rate counts 4 n D d_v operations a head, neither map nor division, and is compared with the rate
of a matrix product of 2048 x 2048 matrices. The textbook is the usual NumPy function.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from _common import (
    D,
    Options,
    Report,
    at_least,
    median,
    operations,
    qkv,
    race,
    ratios,
    run,
    seconds,
    textbook,
)

from linattn import linear_attention

TEXTBOOK = {8192: at_least(2.5), 65536: at_least(5.0)}


def lengths(report: Report, o: Options) -> None:
    sizes = (64, 128) if o.quick else (1024, 2048, 4096, 8192, 65536)
    for heads in (1, 8):
        report.heading(f"{heads} head{'s' * (heads > 1)} x n, float32, d = {D}")
        for n in sizes:
            q, k, v = qkv(heads, n, D)
            times = race(
                {
                    "ours": functools.partial(linear_attention, q, k, v),
                    "textbook": functools.partial(textbook, q, k, v),
                    "matmul": report.machine.matmul,
                },
                o,
            )
            ours = times["ours"]
            work = operations(n, heads)
            near = report.machine.share(work, ours, times["matmul"])
            target = at_least(0.90) if heads == 8 and n <= 8192 else None
            rate = work / median(ours) / 1e9
            label = f"{heads} x {n:,}"
            report.row(
                f"{label}: share of the matmul rate", near, "", target,
                f"{seconds(median(ours))}, {rate:.1f} GFLOP/s", n=n, heads=heads,
            )  # fmt: skip
            report.row(
                f"{label}: faster than the textbook", ratios(times["textbook"], ours), "x",
                TEXTBOOK.get(n), f"textbook {seconds(median(times['textbook']))}", n=n, heads=heads,
            )  # fmt: skip


def dtypes(report: Report, o: Options) -> None:
    """Halves against the textbook in float32: NumPy's own half products have no BLAS."""
    heads, n = (2, 64) if o.quick else (8, 8192)
    report.heading(f"dtypes, {heads} heads x {n:,}; the textbook in halves goes through float32")
    kinds: list[Any] = [np.float32, np.float64, np.float16]
    try:
        from ml_dtypes import bfloat16

        kinds.append(bfloat16)
    except ImportError:
        report.note("no bfloat16: pip install ml_dtypes")
    for kind in kinds:
        q, k, v = qkv(heads, n, D, dtype=kind)

        def through(q: Any = q, k: Any = k, v: Any = v, kind: Any = kind) -> Any:
            wide = np.float64 if kind is np.float64 else np.float32
            q, k, v = (x.astype(wide, copy=False) for x in (q, k, v))
            return textbook(q, k, v).astype(kind, copy=False)

        times = race(
            {
                "ours": functools.partial(linear_attention, q, k, v),
                "textbook": through,
                "matmul": report.machine.matmul,
            },
            o,
        )
        ours = times["ours"]
        name = np.dtype(kind).name
        near = report.machine.share(operations(n, heads), ours, times["matmul"])
        report.row(
            f"{name}: share of the float32 matmul rate", near, "", None,
            seconds(median(ours)), dtype=name,
        )  # fmt: skip
        report.row(
            f"{name}: faster than the textbook", ratios(times["textbook"], ours), "x", None,
            f"textbook {seconds(median(times['textbook']))}", dtype=name,
        )  # fmt: skip


if __name__ == "__main__":
    run("forward", __doc__, lengths, dtypes)
