"""Where does the time go: how far is each form from what its operations and its bytes must take?

The floor of a call is the larger of two times: its operations (4 n D d_v and the normaliser's; for
the causal form those inside the chunks too) at the matrix product's rate, and the bytes of inputs
and output at the copy rate, both of this run. The distance is the measured time over the floor.
Then what a map, a dtype, a state and an instruction set cost.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from _common import (
    D,
    Machine,
    Options,
    Report,
    apart,
    median,
    operations,
    qkv,
    race,
    ratios,
    run,
    seconds,
)

from linattn import State, feature_maps, linear_attention, plan, show_config


def distances(report: Report, o: Options) -> None:
    report.heading("distance to the floor, float32")
    cases = [(8, 1024), (8, 8192), (1, 8192), (1, 65536)]
    for heads, n in [(2, 128)] if o.quick else cases:
        for causal in (False, True):
            q, k, v = qkv(heads, n, D)
            times = race(
                {
                    "ours": functools.partial(linear_attention, q, k, v, causal=causal),
                    "matmul": report.machine.matmul,
                },
                o,
            )
            cost = plan(n, n, D, batch=heads, causal=causal, order="linear").linear
            work = cost.operations + cost.normaliser_operations
            rate = report.machine.matmul_operations / median(times["matmul"])
            by_operations = work / rate
            by_bytes = 4 * q.nbytes / report.machine.copy_rate
            floor = max(by_operations, by_bytes)
            ours = times["ours"]
            report.row(
                f"{'causal' if causal else 'full'}, {heads} x {n:,}: time over the floor",
                [t / floor for t in ours], "x", None,
                f"{seconds(median(ours))}: operations {seconds(by_operations)}, bytes "
                f"{seconds(by_bytes)}", heads=heads, n=n, causal=causal,
                by_operations=by_operations, by_bytes=by_bytes,
            )  # fmt: skip


def parts(report: Report, o: Options) -> None:
    heads, n = (2, 128) if o.quick else (8, 4096)
    q, k, v = qkv(heads, n, D)
    report.heading(f"the two halves of the full form, {heads} x {n:,}, float32")
    state = State.of(k, v)
    times = race(
        {
            "whole": functools.partial(linear_attention, q, k, v),
            "keys and values into a state": lambda: State.of(k, v),
            "queries of a state": lambda: state.query(q),
            "matmul": report.machine.matmul,
        },
        o,
    )
    for name in ("whole", "keys and values into a state", "queries of a state"):
        work = operations(n, heads) / (1 if name == "whole" else 2)
        report.row(
            f"{name}: share of the matmul rate",
            report.machine.share(work, times[name], times["matmul"]), "", None,
            seconds(median(times[name])),
        )  # fmt: skip

    report.heading(f"maps, {heads} x {n:,}, float32: time over that of identity")
    for causal in (False, True):
        sides: dict[str, Callable[[], object]] = {
            name: functools.partial(linear_attention, q, k, v, name, causal=causal)
            for name in feature_maps.names()
        }
        times = race(sides, o)
        for name in feature_maps.names():
            report.row(
                f"{'causal' if causal else 'full'}, {name}", ratios(times[name], times["identity"]),
                "x", None, seconds(median(times[name])), map=name, causal=causal,
            )  # fmt: skip

    report.heading(f"dtypes and layout, {heads} x {n:,}: time over that of float32")
    mask = np.random.default_rng(2).random(n) < 0.5
    wide = [np.ascontiguousarray(np.moveaxis(x, 0, 1)) for x in (q, k, v)]  # (n, heads, d)
    sides = {
        "float32": functools.partial(linear_attention, q, k, v),
        "positions before heads in memory": functools.partial(
            linear_attention, *(np.moveaxis(x, 1, 0) for x in wide)
        ),
        "half of the keys masked": functools.partial(linear_attention, q, k, v, key_mask=mask),
        "one head of keys for all": functools.partial(
            linear_attention, q, k[:1], v[:1], enable_gqa=True
        ),
    }
    for kind in _dtypes():
        x = qkv(heads, n, D, dtype=kind)
        sides[np.dtype(kind).name] = functools.partial(linear_attention, *x)
    times = race(sides, o)
    for name in sides:
        report.row(
            name, ratios(times[name], times["float32"]), "x", None, seconds(median(times[name]))
        )


def _dtypes() -> list[Any]:
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        return [np.float64, np.float16]
    return [np.float64, np.float16, bfloat16]


def child(o: Options, _: str) -> dict[str, Any]:
    """In a process that LINATTN_ISA was set for: what is in use, and shares of the matmul rate."""
    heads, n = (2, 128) if o.quick else (8, 4096)
    machine = Machine(o)
    found = {}
    for dtype in (np.float32, np.float64):
        q, k, v = qkv(heads, n, D, dtype=dtype)
        for causal in (False, True):
            times = race(
                {
                    "ours": functools.partial(linear_attention, q, k, v, causal=causal),
                    "matmul": machine.matmul,
                },
                o,
            )
            name = f"{'causal' if causal else 'full'}, {np.dtype(dtype).name}"
            found[name] = machine.share(operations(n, heads), times["ours"], times["matmul"])
    state = State.zeros((8,), D, D)
    one = qkv(8, 1, D)
    found["step"] = race({"step": lambda: state.step(*one)}, o)["step"]
    return {"set": show_config().instruction_set, "found": found}


def instruction_sets(report: Report, o: Options) -> None:
    report.heading(f"instruction sets, {'2 x 128' if o.quick else '8 x 4,096'}: share of the rate")
    for name in show_config().instruction_sets:
        answer = apart(__file__, name, o, {**os.environ, "LINATTN_ISA": name})
        if answer["set"] != name:
            report.note(f"LINATTN_ISA={name} gave {answer['set']}")
        for what, values in answer["found"].items():
            if what == "step":
                micro = [1e6 * t for t in values]
                report.row(f"{name}: a step of 8 x {D}", micro, "us", set=name)
            else:
                report.row(f"{name}: {what}", values, "", set=name)


if __name__ == "__main__":
    run("floor", __doc__, distances, parts, instruction_sets, child=child)
