"""What does one decoding step cost from Python, and where does the time go?

One token for every head: absorb its key and value, then query, in place. Our sums are float64, so
8 heads x 64 read and write 262 KB a step; ggml's are float32 and its operation has neither feature
map nor denominator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import peers
from _common import (
    Options,
    Report,
    at_most,
    elu1,
    median,
    qkv,
    race,
    ratios,
    run,
    seconds,
)

from linattn import State
from linattn.backends import native


def numpy_step(heads: int, d: int, q: Any, k: Any, v: Any) -> Callable[[], object]:
    """The textbook's recurrence, float32."""
    kv = np.zeros((heads, d, d), np.float32)
    k_sum = np.zeros((heads, d), np.float32)

    def run() -> object:
        nonlocal kv, k_sum
        phi_q, phi_k = elu1(q), elu1(k)
        kv += phi_k.swapaxes(-1, -2) * v
        k_sum += phi_k[:, 0]
        return (phi_q @ kv) / (phi_q @ k_sum[..., None] + 1e-6)

    return run


def measure(report: Report, o: Options) -> None:
    ggml = peers.load("ggml")
    if ggml is not None:
        report.note(f"{ggml.VERSION}, one thread")
        check(ggml)
    for heads, d in ((8, 64),) if o.quick else ((8, 64), (1, 64), (32, 64), (8, 128)):
        report.heading(f"one step, {heads} heads x {d}, float32")
        q, k, v = qkv(heads, 1, d)
        state = State.zeros((heads,), d, d)
        own = State.zeros((heads,), d, d)
        bare = (own.kv, own.k_sum, own.log_scale, q, k, v, "elu1", 1e-6, False, True, None)
        passed = np.zeros((heads, d, d))
        sides: dict[str, Callable[[], object]] = {
            "ours": functools.partial(state.step, q, k, v),
            "core": functools.partial(native.step, *bare),
            "pass": functools.partial(np.add, passed, 0.0, out=passed),
            "NumPy": numpy_step(heads, d, q, k, v),
        }
        if ggml is not None:
            flat = [x[:, 0] for x in (q, k, v)]
            sides["ggml"] = ggml.Step(heads, d).compute
            sides["ggml with copies"] = functools.partial(ggml.Step(heads, d).step, *flat)
        times = race(sides, o)
        ours = times["ours"]
        label = f"{heads} x {d}"
        micro = [1e6 * t for t in ours]
        report.row(
            f"{label}: our step", micro, "us",
            # Where ggml isn't there to compare with: 1.2 times the 6 us it took on one machine.
            at_most(7.2) if (heads, d) == (8, 64) and ggml is None else None, heads=heads, d=d,
        )  # fmt: skip
        report.row(
            f"{label}: of it Python, over the core's verb",
            [1e6 * (a - b) for a, b in zip(ours, times["core"], strict=True)], "us",
        )  # fmt: skip
        report.row(
            f"{label}: one pass of NumPy over such a state", [1e6 * t for t in times["pass"]], "us",
            None, f"{2 * passed.nbytes / median(times['pass']) / 1e9:.0f} GB/s read + written",
        )  # fmt: skip
        report.row(
            f"{label}: faster than NumPy's", ratios(times["NumPy"], ours), "x", None,
            seconds(median(times["NumPy"])),
        )  # fmt: skip
        if ggml is not None:
            report.row(
                f"{label}: time over ggml's operation", ratios(ours, times["ggml"]), "x",
                at_most(1.2) if (heads, d) == (8, 64) else None, seconds(median(times["ggml"])),
            )  # fmt: skip
            report.row(
                f"{label}: time over ggml's with arrays in, out",
                ratios(ours, times["ggml with copies"]), "x", None,
                seconds(median(times["ggml with copies"])),
            )  # fmt: skip


def check(ggml: Any) -> None:
    """That ggml computes the same recurrence, or the comparison would mean nothing."""
    heads, d = 3, 64
    theirs = ggml.Step(heads, d)
    state = State.zeros((heads,), d, d, "identity")
    worst = 0.0
    for seed in range(5):
        q, k, v = qkv(heads, 1, d, seed=seed)
        want = state.step(q, k, v, normalize=False)[:, 0]
        got = theirs.step(*(x[:, 0] for x in (q, k, v)))
        worst = max(worst, float(np.abs(got - want).max() / np.abs(want).max()))
    if worst > 1e-5:
        raise SystemExit(f"ggml's step is not what this adapter takes it for: off by {worst:.1e}")


if __name__ == "__main__":
    run("decode", __doc__, measure)
