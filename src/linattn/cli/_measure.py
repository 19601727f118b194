"""Time and memory of short work, measured so that the figures mean something."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from linattn import FeatureMap, feature_maps, linear_attention, softmax_attention

from ._failure import fail

__all__ = [
    "Fit",
    "arrays",
    "calls",
    "copy_rate",
    "crossover",
    "duration",
    "extra_memory",
    "fit",
    "matmul_rate",
    "named_map",
    "rest",
    "seconds",
    "textbook",
    "textbook_map",
    "textbook_softmax",
]

Array = Any

# Idle workers of a BLAS spin on after a product, OpenBLAS's for a tenth of a second, and would take
# a core from what comes next: so we look this often (in seconds) whether the process is idle.
REST = 0.02
LONGEST_REST = 1.0


# What is measured against: the formulas as they stand in books


def named_map(name: str | None) -> FeatureMap:
    """The feature map of a name, as far as a command can use it."""
    found = feature_maps.get(name)
    if getattr(found, "positional", False):
        fail(
            f"--feature-map {name}: expected a map that doesn't depend on positions, which only "
            "Python can give: linear_attention(q, k, v, feature_map.at(range(n)))"
        )
    return found


def textbook_map(name: str) -> Callable[[Array], Array]:
    """A feature map as one writes it in NumPy; a family's is a function of arrays already."""
    maps: dict[str, Callable[[Array], Array]] = {
        "elu1": lambda x: np.where(x > 0, x + 1, np.exp(x)),
        "relu": lambda x: np.maximum(x, 0),
        "squared_relu": lambda x: np.maximum(x, 0) ** 2,
        "exp": np.exp,
        "softplus": lambda x: np.logaddexp(0, x),
        "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
        "identity": lambda x: x,
    }
    return maps[name] if name in maps else feature_maps.get(name)


def textbook(
    Q: Array, K: Array, V: Array, feature_map: Callable[[Array], Array], eps: float = 1e-6
) -> Array:
    """Linear attention as one writes it in NumPy: (..., n, d) -> (..., n, d_v)."""
    phi_Q, phi_K = feature_map(Q), feature_map(K)
    aggregate = phi_K.swapaxes(-1, -2) @ V
    key_sum = phi_K.sum(axis=-2)[..., None]
    numerator = phi_Q @ aggregate
    denominator = phi_Q @ key_sum
    return numerator / (denominator + eps)


def textbook_softmax(Q: Array, K: Array, V: Array) -> Array:
    """Softmax attention with its n x n matrix."""
    scores = Q @ K.T / np.sqrt(Q.shape[-1], dtype=Q.dtype)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ V


def calls(q: Array, k: Array, v: Array, feature_map: str) -> dict[str, Callable[[], Array]]:
    """The forms that are compared, by name, ready to be called. q, k, v: (n, d)"""
    phi, eps = textbook_map(feature_map), feature_maps.get(feature_map).eps
    return {
        "linear": lambda: linear_attention(q, k, v, feature_map, order="linear"),
        "quadratic": lambda: linear_attention(q, k, v, feature_map, order="quadratic"),
        "textbook": lambda: textbook(q, k, v, phi, eps),
        "softmax": lambda: softmax_attention(q, k, v),
        "textbook softmax": lambda: textbook_softmax(q, k, v),
    }


def arrays(shapes: Sequence[tuple[int, ...]], dtype: Any, seed: int = 0) -> list[Array]:
    """Normal numbers, made without large temporary arrays where the dtype allows."""
    rng = np.random.default_rng(seed)
    found = []
    for shape in shapes:
        if np.dtype(dtype).name in ("float32", "float64"):
            x = np.empty(shape, dtype)
            rng.standard_normal(out=x, dtype=x.dtype)
        else:
            x = rng.standard_normal(shape, dtype=np.float32).astype(dtype)
        found.append(x)
    return found


# Time


def seconds(work: Callable[[], object], budget: float = 0.1) -> float:
    """Seconds of one call: the fastest of several rows of calls that take the budget together.

    Short work is timed as many calls in a row, as one alone is shorter than what the clock and
    other processes disturb; long work at least five times, unless that takes four budgets.
    """
    once = duration(work)
    repeats = max(1, int(budget / 8 / max(once, 1e-7)))
    best, rows, start = once, 0, time.perf_counter()
    while True:
        best = min(best, duration(lambda: _repeated(work, repeats)) / repeats)
        rows += 1
        taken = time.perf_counter() - start + once
        if taken + best * repeats > (budget if rows >= 4 else 4 * budget):
            return best


def _repeated(work: Callable[[], object], repeats: int) -> None:
    for _ in range(repeats):
        work()


def duration(work: Callable[[], object]) -> float:
    """Seconds of this one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def rest() -> None:
    """Sleeps until no thread of this process runs any more.

    A fixed 20 ms was not enough: NumPy's OpenBLAS lets its workers spin for 2^28 ticks of the
    processor's clock, 0.11 s at 2.45 GHz, and a call of ours in that time has half the machine.
    """
    end = time.perf_counter() + LONGEST_REST
    while time.perf_counter() < end:
        used, start = time.process_time(), time.perf_counter()
        time.sleep(REST)
        if time.process_time() - used < 0.1 * (time.perf_counter() - start):
            return


def matmul_rate(n: int = 2048, repeats: int = 3) -> float:
    """Operations a second of NumPy's float32 matrix product, the best of some."""
    a, b = arrays([(n, n), (n, n)], np.float32)
    out = np.empty((n, n), np.float32)
    np.matmul(a, b, out=out)
    best = min(duration(lambda: np.matmul(a, b, out=out)) for _ in range(repeats))
    rest()
    return 2 * n**3 / best


def copy_rate(nbytes: int = 1 << 27, repeats: int = 3) -> float:
    """Bytes a second, read plus written, of a copy, the best of some."""
    source = np.ones(nbytes // 4, np.float32)
    target = np.empty_like(source)
    np.copyto(target, source)
    return 2 * nbytes / min(duration(lambda: np.copyto(target, source)) for _ in range(repeats))


# Growth


class Fit(NamedTuple):
    """time = factor * n ** exponent, by least squares of the logarithms over `points` points."""

    exponent: float
    factor: float
    points: int

    def __call__(self, n: float) -> float:
        return float(self.factor * n**self.exponent)


def fit(n: Sequence[float], values: Sequence[float], least: float = 0) -> Fit | None:
    """The power law through the points with n >= least; None if there are fewer than two."""
    pairs = [(math.log(x), math.log(y)) for x, y in zip(n, values, strict=True) if x >= least]
    if len(pairs) < 2:
        return None
    mean_x = math.fsum(x for x, _ in pairs) / len(pairs)
    mean_y = math.fsum(y for _, y in pairs) / len(pairs)
    above = math.fsum((x - mean_x) * (y - mean_y) for x, y in pairs)
    exponent = above / math.fsum((x - mean_x) ** 2 for x, _ in pairs)
    return Fit(exponent, math.exp(mean_y - exponent * mean_x), len(pairs))


def crossover(n: Sequence[int], ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Where `ours` becomes the smaller one for good, between measured points by logarithms.

    The first n if it always is; None if it isn't at the last.
    """
    behind = [a > b for a, b in zip(ours, theirs, strict=True)]
    if behind[-1]:
        return None
    if not any(behind):
        return float(n[0])
    i = max(i for i, b in enumerate(behind) if b)
    before = math.log(ours[i] / theirs[i])  # > 0
    after = math.log(ours[i + 1] / theirs[i + 1])  # <= 0
    part = before / (before - after)
    return math.exp((1 - part) * math.log(n[i]) + part * math.log(n[i + 1]))


# Memory


def extra_memory(kind: str, n: int, d: int, feature_map: str) -> int | None:
    """Peak bytes beyond inputs and output of one call, by a process of its own; None: unknown."""
    if not sys.executable:
        return None
    work = {"kind": kind, "n": n, "d": d, "feature_map": feature_map}
    finished = subprocess.run(
        [sys.executable, "-c", "from linattn.cli._memory import main; main()", json.dumps(work)],
        env={**os.environ, "PYTHONSAFEPATH": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
    )
    if finished.returncode != 0 or not finished.stdout.strip().isdigit():
        return None
    return int(finished.stdout)
