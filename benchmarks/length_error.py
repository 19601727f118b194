"""Does the error grow with n?

The largest error of some queries against n keys, as a multiple c of epsilon times the size that a
rounding error may have, phi(q) (phi(K)^T |V|) / denominator: law 1's c, which must not grow. The
truth is the formula in float64. The textbook is the usual NumPy function in the same dtype; where
it overflows, the table says so. `--plot FILE` draws c against n.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _picture
import numpy as np
from _common import D, Options, Report, at_most, run, textbook

from linattn import linear_attention

QUERIES = 67
BLOCK = 1 << 16


def phi(x: Any) -> Any:
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def truth(q: Any, k: Any, v: Any, eps: float = 1e-6) -> tuple[Any, Any]:
    """The output in float64, and the size of a rounding error in units of epsilon."""
    kv = size = z = 0.0
    for start in range(0, k.shape[0], BLOCK):
        rows = slice(start, start + BLOCK)
        f, w = phi(k[rows].astype(np.float64)), v[rows].astype(np.float64)
        kv, size, z = kv + f.T @ w, size + f.T @ np.abs(w), z + f.sum(axis=0)
    f = phi(q.astype(np.float64))
    below = (f @ z + eps)[:, None]
    return f @ kv / below, f @ size / below


def error(call: Callable[..., Any], q: Any, k: Any, v: Any, want: Any, size: Any) -> float:
    """c; inf where the result is not finite."""
    with np.errstate(all="ignore"):
        got = call(q, k, v).astype(np.float64)
    if not np.isfinite(got).all():
        return math.inf
    return float((np.abs(got - want) / (size * np.finfo(q.dtype).eps)).max())


def measure(report: Report, o: Options) -> None:
    powers = (6, 8) if o.quick else (8, 10, 12, 14, 16, 18, 20, 22)
    curves: dict[str, dict[int, float]] = {}
    for dtype in (np.float32, np.float16):
        name = np.dtype(dtype).name
        report.heading(f"{name}, {QUERIES} queries, d = {D}, keys normal, values 1 + normal: c")
        rng = np.random.default_rng(3)
        most = 2 ** powers[-1]
        q = rng.standard_normal((QUERIES, D), dtype=np.float32).astype(dtype)
        k = rng.standard_normal((most, D), dtype=np.float32).astype(dtype)
        v = (1 + rng.standard_normal((most, D), dtype=np.float32)).astype(dtype)
        sides: dict[str, Callable[..., Any]] = {"ours": linear_attention, "the textbook": textbook}
        for who in sides:
            curves[f"{who}, {name}"] = {}
        for power in powers:
            n = 2**power
            want, size = truth(q, k[:n], v[:n])
            for who, call in sides.items():
                if who != "ours" and dtype is np.float16 and power > 14:
                    continue  # NumPy's own half products take ever longer to overflow
                c = error(call, q, k[:n], v[:n], want, size)
                curves[f"{who}, {name}"][n] = c
                note = "" if math.isfinite(c) else "not finite: overflow"
                report.row(f"{who}, n = {n:,}", c, "e", None, note, n=n, dtype=name, who=who)
        ours = list(curves[f"ours, {name}"].values())
        report.row(
            f"ours, {name}: largest c over that of the shortest", max(ours) / ours[0], "x",
            at_most(2.0), dtype=name,
        )  # fmt: skip
    equal(report, o)
    if o.plot is not None:
        draw(curves, o.plot)


def equal(report: Report, o: Options) -> None:
    """Equal keys beyond 2^24, where a float32 sum stands still: a view, and one feature."""
    n = 2 ** (10 if o.quick else 25)
    report.heading(f"{n:,} equal keys, one feature, float32: c")
    k = np.broadcast_to(np.float32(0.1), (n, 1))
    v = np.broadcast_to(np.float32(0.3), (n, 1))
    q = np.full((3, 1), np.float32(0.1))
    want = np.full((3, 1), float(np.float32(0.3)))
    sides: dict[str, Callable[..., Any]] = {"ours": linear_attention, "the textbook": textbook}
    for who, call in sides.items():
        report.row(f"{who}, n = {n:,}", error(call, q, k, v, want, np.abs(want)), "e", n=n, who=who)
    one = np.float32(1.1)
    naive = np.add.accumulate(np.broadcast_to(one, (n,)))[-1] / (np.float64(one) * n)
    report.row(f"a running sum in float32, n = {n:,}: of the true sum", float(naive), "")


def draw(curves: dict[str, dict[int, float]], path: Path) -> None:
    """c against n, log-log; crosses on the top edge are overflows."""
    figure, axes = _picture.pyplot().subplots(figsize=(7, 4.4), layout="constrained")
    for name, curve in curves.items():
        finite = {n: c for n, c in curve.items() if math.isfinite(c)}
        axes.plot(
            list(finite), list(finite.values()), "o-" if "32" in name else "s:", markersize=4,
            color="#0b6e99" if name.startswith("ours") else "#c1440e", label=name,
        )  # fmt: skip
        lost = [n for n in curve if n not in finite]
        axes.plot(
            lost, [0.97] * len(lost), "x", color="#c1440e", transform=axes.get_xaxis_transform()
        )
    y = "largest error, in epsilons of its natural size"
    _picture.against_length(axes, "n, keys", y, "crosses: overflow")
    _picture.save(figure, path)


if __name__ == "__main__":
    run("length_error", __doc__, measure, plot=True)
