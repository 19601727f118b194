"""How does time grow with n: what is the slope on a log-log scale?

Linear attention from 2^14 to 2^20 positions, one head; softmax attention, with its slope of 2, as
far as it goes in reasonable time. `--plot FILE` draws time against n.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import _picture
import numpy as np
from _common import (
    D,
    Options,
    Report,
    about,
    median,
    qkv,
    race,
    run,
    seconds,
    softmax,
    textbook,
)

from linattn import linear_attention

Curve = dict[int, list[float]]  # n: seconds a call, round by round


def slopes(curve: Curve) -> list[float]:
    """The fitted exponent of time against n, round by round."""
    x = np.log(list(curve))
    return [float(np.polyfit(x, np.log(y), 1)[0]) for y in zip(*curve.values(), strict=True)]


def measure(report: Report, o: Options) -> None:
    high = (6, 9) if o.quick else (14, 20)
    low = (4, 6) if o.quick else (4, 13)
    q, k, v = (x[0] for x in qkv(1, 2 ** high[1], D))

    def walk(call: Callable[..., object], powers: Sequence[int]) -> Curve:
        sides = {
            str(2**p): functools.partial(call, q[: 2**p], k[: 2**p], v[: 2**p]) for p in powers
        }
        return {int(n): times for n, times in race(sides, o).items()}

    causal = functools.partial(linear_attention, causal=True)
    everything = range(low[0], high[1] + 1)
    curves = {
        "linear attention": walk(linear_attention, everything),
        "linear attention, causal": walk(causal, everything),
        "textbook linear attention": walk(textbook, everything),
        "softmax attention": walk(softmax, range(low[0], low[1] + 1)),
    }
    span = f"2^{high[0]} to 2^{high[1]}"
    report.heading(f"one head, float32, d = {D}: slopes from n = {span}")
    for name, curve in curves.items():
        upper = {n: t for n, t in curve.items() if n >= 2 ** high[0]}
        ours = name.startswith("linear")
        if name.startswith("softmax"):
            upper = {n: t for n, t in curve.items() if n >= 2 ** (low[1] - 3)}
        first, last = min(upper), max(upper)
        report.row(
            f"{name}: slope", slopes(upper), "", about(1.0, 0.05) if ours else None,
            f"{seconds(median(upper[first]))} at {first:,}, {seconds(median(upper[last]))} at "
            f"{last:,}", seconds={n: median(t) for n, t in curve.items()},
        )  # fmt: skip
    report.heading("crossover")
    fast, slow = curves["linear attention"], curves["softmax attention"]
    won = [n for n in slow if median(fast[n]) < median(slow[n])]
    least = min(won, default=None)
    report.note(f"faster than softmax attention in NumPy from n = {least} (of {min(slow)} ...)")
    if o.plot is not None:
        medians = {name: {n: median(t) for n, t in c.items()} for name, c in curves.items()}
        threads = report.machine.threads
        draw(medians, o.plot, f"one head, d = {D}, float32, {threads} threads, NumPy arrays")


def draw(curves: Mapping[str, Mapping[int, float]], path: Path, about: str) -> None:
    """Time against n, log-log."""
    looks = {
        "linear attention": ("#0b6e99", "o", "-"),
        "linear attention, causal": ("#0b6e99", "o", ":"),
        "textbook linear attention": ("#8a8a8a", "s", "-"),
        "softmax attention": ("#c1440e", "^", "-"),
    }
    figure, axes = _picture.pyplot().subplots(figsize=(7, 4.4), layout="constrained")
    for name, curve in curves.items():
        colour, mark, line = looks[name]
        hollow = "white" if line == ":" else colour
        axes.plot(
            list(curve), list(curve.values()), line, color=colour, marker=mark,
            markersize=4, markerfacecolor=hollow, label=name,
        )  # fmt: skip
    _picture.against_length(axes, "n, positions", "time of a call", about)
    axes.yaxis.set_major_formatter(lambda t, _: seconds(t).replace("us", "µs"))
    _picture.save(figure, path)


if __name__ == "__main__":
    run("growth", __doc__, measure, plot=True)
