"""How near is the causal forward pass to the matrix product?

Counted as 4 n D d_v operations a head, as for the full form; the work inside the chunks comes on
top, so that 1 is out of reach: at chunks of 64 the same rate would show as some 0.65.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import peers
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
    textbook_causal,
)

from linattn import linear_attention


def measure(report: Report, o: Options) -> None:
    sdpa = peers.load("sdpa")
    if o.quick:
        cases = [(8, 64, 0.60), (1, 512, 0.45)]
    else:
        cases = [(8, n, 0.60) for n in (1024, 2048, 4096, 8192)] + [(1, 65536, 0.45)]
    for heads, n, target in cases:
        report.heading(f"{heads} head{'s' * (heads > 1)} x {n:,}, float32, d = {D}")
        q, k, v = qkv(heads, n, D)
        sides: dict[str, Callable[[], object]] = {
            "ours": functools.partial(linear_attention, q, k, v, causal=True),
            "matmul": report.machine.matmul,
            "NumPy in chunks": functools.partial(textbook_causal, q, k, v),
            "full": functools.partial(linear_attention, q, k, v),
        }
        if sdpa is not None and n <= 8192:  # beyond, one call takes minutes
            sides["torch SDPA"] = sdpa.side(q, k, v, causal=True)
        times = race(sides, o)
        ours = times["ours"]
        label = f"{heads} x {n:,}"
        work = operations(n, heads)
        report.row(
            f"{label}: share of the matmul rate",
            report.machine.share(work, ours, times["matmul"]), "", at_least(target),
            f"{seconds(median(ours))}, {work / median(ours) / 1e9:.1f} GFLOP/s", n=n, heads=heads,
        )  # fmt: skip
        report.row(f"{label}: time over the full form", ratios(ours, times["full"]), "x")
        for name in ("NumPy in chunks", "torch SDPA"):
            if name in times:
                report.row(
                    f"{label}: faster than {name}", ratios(times[name], ours), "x",
                    at_least(40) if name == "torch SDPA" and n == 8192 else None,
                    seconds(median(times[name])), n=n, heads=heads,
                )  # fmt: skip


if __name__ == "__main__":
    run("causal", __doc__, measure)
