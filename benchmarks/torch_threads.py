"""Do torch's operators and ours, called in turn, slow each other? Is torch's thread count obeyed?

Two runtimes of threads in one process may fight for the cores: the idle workers of one spin while
the other's want to run. So each operator is timed alone and in turn with the other, without a
rest, with OpenMP's own waiting and with `OMP_WAIT_POLICY=passive`, in processes of their own. Alone
means two of the same in turn on data of their own, so that both ways find the caches as full.

That a count is obeyed shows in the processor time a call takes: never more than so many seconds a
second.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

import peers
from _common import D, Options, Report, apart, at_most, median, qkv, ratios, rest, run, seconds

from linattn import linear_attention

# Of a layer: positions and width of torch's product, heads and positions of ours.
SIZES = {"short": (128, 256, 4, 128), "medium": (1024, 512, 8, 1024), "long": (8192, 512, 8, 8192)}
POLICIES = {"OpenMP's own waiting": None, "OMP_WAIT_POLICY=passive": "passive"}


def in_turn(first: Callable[[], object], second: Callable[[], object], o: Options) -> Any:
    """Seconds of each, the two called one after the other without a rest."""
    for _ in range(2):
        first(), second()
    spent, calls, clock = [0.0, 0.0], 0, time.perf_counter
    until = clock() + 4 * o.turn
    while calls < 3 or clock() < until:
        a = clock()
        first()
        b = clock()
        second()
        spent[0] += b - a
        spent[1] += clock() - b
        calls += 1
    return [x / calls for x in spent]


def child(o: Options, names: list[str]) -> dict[str, Any]:
    """Under the environment's policy: times of every size."""
    import torch
    from torch.nn.functional import linear

    found: dict[str, Any] = {}
    with torch.inference_mode():
        for name in names:
            rows, width, heads, n = SIZES[name]
            theirs = [
                functools.partial(linear, torch.randn(rows, width), torch.randn(width, width))
                for _ in range(2)
            ]
            ours = [
                functools.partial(
                    linear_attention, *(torch.from_numpy(x)[None] for x in qkv(heads, n, D, seed=i))
                )
                for i in range(2)
            ]
            times: dict[str, list[float]] = {}
            for _ in range(o.rounds):
                rest(o)
                for key, pair in (("torch", theirs), ("linattn", ours)):
                    alone = sum(in_turn(*pair, o)) / 2
                    times.setdefault(f"{key} alone", []).append(alone)
                    rest(o)
                a, b = in_turn(theirs[0], ours[0], o)
                times.setdefault("torch in turn", []).append(a)
                times.setdefault("linattn in turn", []).append(b)
            found[name] = times
    return found


def turns(report: Report, o: Options) -> None:
    names = ["short"] if o.quick else list(SIZES)
    for what, policy in POLICIES.items():
        report.heading(f"in turn over alone, {what}")
        environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
        if policy:
            environment["OMP_WAIT_POLICY"] = policy
        for name, times in apart(__file__, names, o, environment).items():
            for key in ("torch", "linattn"):
                alone, turn = times[f"{key} alone"], times[f"{key} in turn"]
                kind = "torch's linear layer" if key == "torch" else "linear_attention"
                report.row(
                    f"{policy or 'default'}, {name}: {kind}", ratios(turn, alone), "x",
                    at_most(1.10), f"alone {seconds(median(alone))}", policy=policy or "default",
                )  # fmt: skip


def counts(report: Report, o: Options) -> None:
    """Processor seconds a second of a call, for each count that torch is told."""
    import torch

    report.heading("torch.set_num_threads: processor seconds a second of linear_attention")
    inputs = [torch.from_numpy(x)[None] for x in qkv(8, 64 if o.quick else 4096, D)]
    before = torch.get_num_threads()
    walls = {}
    try:
        for count in range(1, before + 1):
            torch.set_num_threads(count)
            busy, wall = [], []
            for _ in range(o.rounds):
                rest(o)
                linear_attention(*inputs)
                calls, start, used = 0, time.perf_counter(), time.process_time()
                while time.perf_counter() - start < 4 * o.turn or calls < 2:
                    linear_attention(*inputs)
                    calls += 1
                lasted = time.perf_counter() - start
                busy.append((time.process_time() - used) / lasted)
                wall.append(lasted / calls)
            walls[count] = wall
            report.row(
                f"{count} thread{'s' * (count > 1)}", busy, "", at_most(1.02 * count),
                seconds(median(wall)), threads=count,
            )  # fmt: skip
    finally:
        torch.set_num_threads(before)
    if before > 1:
        report.row(f"{before} threads: faster than one", ratios(walls[1], walls[before]), "x")


def measure(report: Report, o: Options) -> None:
    if peers.load("ours") is None:
        report.note("skipped: needs torch")
        return
    turns(report, o)
    counts(report, o)


if __name__ == "__main__":
    run("torch_threads", __doc__, measure, child=child)
