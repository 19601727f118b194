"""What does it bring that the core makes a map's projection itself, a block of rows at a time?

The other road makes an array of features, or of exponents, in NumPy first, and the core reads that.
Both sides are the same public call. Of short sequences also: is the automatic order the better one?
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from _common import D, Options, Report, Side, median, qkv, race, ratios, run
from _common import seconds as written

from linattn import State, feature_maps, linear_attention
from linattn.backends import native

WEIGHT = np.random.default_rng(5).standard_normal((64, D)).astype(np.float32) / 8
INSIDE: dict[str, Any] = {
    "favor(features=64)": feature_maps.favor(64),
    "favor": feature_maps.favor(),
    "favor, hyperbolic": feature_maps.favor(kind="hyperbolic"),
    "relu_random": feature_maps.relu_random(),
    "hedgehog": feature_maps.hedgehog(WEIGHT),
    "t2r": feature_maps.t2r(WEIGHT),
    "t2r, queries' own": feature_maps.t2r(WEIGHT, query_weight=-WEIGHT),
    "performer_learned": feature_maps.performer_learned(WEIGHT),
    "softmax": feature_maps.softmax(),
    "rfa": feature_maps.rfa(),
    "performer_relu": feature_maps.performer_relu(),
    "dpfp(nu=3)": feature_maps.dpfp(3),
    "hedgehog, halves": feature_maps.hedgehog(WEIGHT, normalise="halves"),
    "polynomial_sketch": feature_maps.polynomial_sketch(),
    "polynomial_sketch(32), squared": feature_maps.polynomial_sketch(32, squared=True),
    "cosformer": feature_maps.cosformer(8192),
}


def arrays_first(call: Side) -> Side:
    """The same call as if the core made no projection."""

    def side() -> object:
        fused = native.fused
        native.fused = lambda found, x, sides="qk": found.kernel if found.project is None else None
        try:
            return call()
        finally:
            native.fused = fused

    return side


def compare(report: Report, o: Options, label: str, call: Side, **about: Any) -> None:
    times = race({"inside": call, "arrays": arrays_first(call)}, o)
    inside, arrays = (median(times[side]) for side in ("inside", "arrays"))
    report.row(
        f"{label}: faster than with arrays", ratios(times["arrays"], times["inside"]), "x", None,
        f"{written(inside)}, with arrays {written(arrays)}", **about,
    )  # fmt: skip


def calls(report: Report, o: Options) -> None:
    sizes = ((1, 64), (2, 64)) if o.quick else ((1, 1024), (1, 8192), (8, 4096))
    for heads, n in sizes:
        report.heading(f"{heads} head{'s' * (heads > 1)} x {n:,}, float32, d = {D}")
        q, k, v = qkv(heads, n, D)
        for name, found in INSIDE.items():
            found = found.at(range(n)) if found.positional else found
            for causal in (False, True):
                call = functools.partial(
                    linear_attention, q, k, v, found, causal=causal, order="linear"
                )
                form = "causal" if causal else "full"
                label = f"{name}, {form}, {heads} x {n:,}"
                compare(report, o, label, call, map=name, n=n, heads=heads, form=form)


def short(report: Report, o: Options) -> None:
    """Where the quadratic order is in question, which makes features of keys more than once."""
    for n in (16,) if o.quick else (16, 48):
        report.heading(f"8 heads x {n}, float32, d = {D}, order='auto'")
        q, k, v = qkv(8, n, D)
        for name, found in INSIDE.items():
            found = found.at(range(n)) if found.positional else found
            call = functools.partial(linear_attention, q, k, v, found)
            about = {"map": name, "n": n, "heads": 8, "form": "full"}
            compare(report, o, f"{name}, full, 8 x {n}", call, **about)
            over, took = {}, {}
            for order in ("linear", "quadratic"):
                times = race({"auto": call, order: functools.partial(call, order=order)}, o)
                over[order] = ratios(times["auto"], times[order])
                took[order] = median(times[order])
            better = max(over, key=lambda order: median(over[order]))
            report.row(
                f"{name}, full, 8 x {n}: auto over the better order", over[better], "x", None,
                ", ".join(f"{order} {written(t)}" for order, t in took.items()), **about,
            )  # fmt: skip


def steps(report: Report, o: Options) -> None:
    report.heading(f"one step of decoding, 8 heads, d = {D}")
    q, k, v = qkv(8, 1, D)
    for name, found in INSIDE.items():
        state = State.zeros(8, found.width(D), D, found)
        step = functools.partial(state.step, q, k, v)
        if found.positional:  # a position of its own for each step
            step = functools.partial(lambda state: state.at([3]).step(q, k, v), state)
        compare(report, o, f"{name}, step", step, map=name)


if __name__ == "__main__":
    run("projections", __doc__, calls, short, steps)
