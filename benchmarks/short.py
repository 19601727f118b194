"""Is any short sequence slower than with the alternatives?

n = 16 ... 256, one head and eight, many calls in a row, against the textbook NumPy function and,
where torch is there, its softmax attention.
"""

from __future__ import annotations

import functools

import peers
from _common import (
    D,
    Options,
    Report,
    at_least,
    median,
    qkv,
    race,
    ratios,
    run,
    seconds,
    textbook,
)

from linattn import linear_attention, plan


def measure(report: Report, o: Options) -> None:
    sdpa = peers.load("sdpa")
    if sdpa is not None:
        report.note(f"{sdpa.VERSION}, in inference mode, tensors made beforehand")
    for heads in (1, 8):
        report.heading(f"{heads} head{'s' * (heads > 1)} x n, float32, d = {D}")
        for n in (16, 64) if o.quick else (16, 32, 64, 128, 256):
            q, k, v = qkv(heads, n, D)
            sides = {
                "ours": functools.partial(linear_attention, q, k, v),
                "textbook": functools.partial(textbook, q, k, v),
                "ours causal": functools.partial(linear_attention, q, k, v, causal=True),
            }
            if sdpa is not None:
                sides["SDPA"] = sdpa.side(q, k, v)
                sides["causal SDPA"] = sdpa.side(q, k, v, causal=True)
            times = race(sides, o)
            order = plan(n, n, D).order
            report.row(
                f"{heads} x {n}: faster than the textbook",
                ratios(times["textbook"], times["ours"]), "x", at_least(1.0),
                f"ours {seconds(median(times['ours']))} ({order}), textbook "
                f"{seconds(median(times['textbook']))}", n=n, heads=heads,
            )  # fmt: skip
            for theirs, ours in (("SDPA", "ours"), ("causal SDPA", "ours causal")):
                if theirs in times:
                    report.row(
                        f"{heads} x {n}: faster than {theirs}",
                        ratios(times[theirs], times[ours]), "x", at_least(1.0),
                        f"{ours} {seconds(median(times[ours]))}, {theirs} "
                        f"{seconds(median(times[theirs]))}", n=n, heads=heads,
                    )  # fmt: skip


if __name__ == "__main__":
    run("short", __doc__, measure)
