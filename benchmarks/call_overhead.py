"""What does a call from Python cost over the kernel?

On arrays of one element the kernel has next to nothing to do, so that the whole call is what Python
and the checks take. Beside it what cannot be avoided: a Python function with such arguments that
does nothing, and the cheapest things that NumPy does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from _common import Options, Report, at_most, race, run

from linattn import State, linear_attention
from linattn.backends import native


def nothing(
    q: Any,
    k: Any,
    v: Any,
    feature_map: Any = None,
    eps: float | None = None,
    *,
    causal: bool = False,
    key_mask: Any = None,
    cu_seqlens: Any = None,
    enable_gqa: bool = False,
    normalize: bool = True,
    state: Any = None,
    return_state: bool = False,
    order: str = "auto",
    out: Any = None,
) -> Any:
    """The signature of `linear_attention` and no work."""
    return q


def measure(report: Report, o: Options) -> None:
    q = np.ones((1, 1), np.float32)
    four = np.ones((1, 1, 1, 1), np.float32)
    batch = np.ones((2, 3, 1, 1), np.float32)
    out = np.empty_like(q)
    state, own = State.zeros((), 1, 1), State.zeros((), 1, 1)
    heads = State.zeros((8,), 1, 1)
    eight = np.ones((8, 1, 1), np.float32)
    given = State.of(q, q)
    attend = ("elu1", 1e-6, False, None, None, False, True, None, False, "auto", None)
    sides: dict[str, Callable[[], object]] = {
        "a Python function of that signature": lambda: nothing(q, q, q),
        "numpy.empty((1, 1))": lambda: np.empty((1, 1), np.float32),
        "numpy.matmul(q, q)": lambda: np.matmul(q, q),
        "the core's attend alone": lambda: native.attend(q, q, q, *attend),
        "linear_attention(q, k, v)": lambda: linear_attention(q, q, q),
        "linear_attention(q, k, v, out=out)": lambda: linear_attention(q, q, q, out=out),
        "linear_attention, causal": lambda: linear_attention(q, q, q, causal=True),
        "linear_attention, exp": lambda: linear_attention(q, q, q, "exp"),
        "linear_attention, (1, 1, 1, 1)": lambda: linear_attention(four, four, four),
        "linear_attention, (2, 3, 1, 1)": lambda: linear_attention(batch, batch, batch),
        "linear_attention, state=": lambda: linear_attention(q, q, q, state=given),
        "linear_attention, return_state": lambda: linear_attention(q, q, q, return_state=True),
        "linear_attention, a lambda": lambda: linear_attention(q, q, q, lambda x: x),
        "linear_attention, mixed dtypes": lambda: linear_attention(q, q, q.astype(np.float64)),
        "the core's step alone": lambda: native.step(
            own.kv, own.k_sum, None, q, q, q, "elu1", 1e-6, False, True, None
        ),
        "State.step": lambda: state.step(q, q, q),
        "State.step, out=": lambda: state.step(q, q, q, out=out),
        "State.step, 8 heads": lambda: heads.step(eight, eight, eight),
        "State.query": lambda: given.query(q),
        "State.absorb": lambda: state.absorb(q, q),
    }
    judged = {"linear_attention(q, k, v)", "State.step"}
    report.heading("microseconds a call, arrays of one element")
    times = race(sides, o)
    for name, values in times.items():
        micro = [1e6 * t for t in values]
        report.row(name, micro, "us", at_most(5.0) if name in judged else None)
    report.heading("of it Python, over the core's verb")
    for name, core in (
        ("linear_attention(q, k, v)", "the core's attend alone"),
        ("State.step", "the core's step alone"),
    ):
        differences = [1e6 * (a - b) for a, b in zip(times[name], times[core], strict=True)]
        report.row(name, differences, "us")


if __name__ == "__main__":
    run("call_overhead", __doc__, measure)
