"""How much slower is a call beside a busy process on one of the cores?

A neighbour bound to one core spins; it is stopped and continued, so that quiet and busy turns
follow each other. The mean of a turn counts, not its best call. With half of one core of two gone,
4/3 is what is left to lose when the work is shared on demand; a fixed half to a core would make 2,
and waiting for a thread that isn't scheduled more.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys

from _common import (
    D,
    Options,
    Report,
    at_most,
    median,
    qkv,
    race,
    ratios,
    run,
    seconds,
    textbook,
)

from linattn import linear_attention

SPIN = """
import os, sys
parent = os.getppid()
if len(sys.argv) > 1:
    os.sched_setaffinity(0, {int(sys.argv[1])})
print("ready", flush=True)
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


def measure(report: Report, o: Options) -> None:
    if not hasattr(signal, "SIGSTOP"):
        report.note("skipped: this system cannot stop and continue a process")
        return
    report.heading(f"busy neighbour on one core, float32, d = {D}")
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    report.note(
        f"{report.machine.threads} threads on {len(cores) or os.cpu_count()} cores; the neighbour "
        + (f"is bound to core {cores[-1]}" if cores else "may run on any")
    )
    command = [sys.executable, "-c", SPIN, *(str(c) for c in cores[-1:])]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as neighbour:
        assert neighbour.stdout is not None
        neighbour.stdout.readline()
        neighbour.send_signal(signal.SIGSTOP)
        try:
            for heads, n, causal in (
                ((8, 64, False),)
                if o.quick
                else ((8, 8192, False), (8, 8192, True), (1, 8192, False), (1, 65536, True),
                      (8, 1024, False), (1, 1024, False))
            ):  # fmt: skip
                one(report, o, neighbour, heads, n, causal)
        finally:
            neighbour.kill()


def one(
    report: Report, o: Options, neighbour: subprocess.Popen[bytes], heads: int, n: int, causal: bool
) -> None:
    q, k, v = qkv(heads, n, D)
    call = functools.partial(linear_attention, q, k, v, causal=causal)
    theirs = functools.partial(textbook, q, k, v)
    # Turns long enough for many slices of the scheduler.
    longer = Options(**{**vars(o), "turn": 0.0 if o.quick else max(o.turn, 0.3)})
    rounds: dict[str, tuple[list[float], list[float]]] = {"ours": ([], []), "textbook": ([], [])}
    single = Options(**{**vars(longer), "rounds": 1})
    for _ in range(o.rounds):
        for busy in (0, 1):
            neighbour.send_signal(signal.SIGCONT if busy else signal.SIGSTOP)
            sides = {"ours": call} if causal else {"ours": call, "textbook": theirs}
            for name, times in race(sides, single).items():
                rounds[name][busy].extend(times)
        neighbour.send_signal(signal.SIGSTOP)
    form = "causal" if causal else "full"
    for name, (quiet, busy_times) in rounds.items():
        if quiet:
            report.row(
                f"{form}, {heads} x {n:,}: {name}, busy over quiet",
                ratios(busy_times, quiet), "x", at_most(2.2) if name == "ours" else None,
                f"{seconds(median(quiet))}, {seconds(median(busy_times))}", n=n, heads=heads,
            )  # fmt: skip


if __name__ == "__main__":
    run("neighbour", __doc__, measure)
