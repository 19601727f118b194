"""What the benchmarks against torch and other libraries share; imports none of them itself."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import peers
from _common import (
    D,
    Options,
    Report,
    Row,
    Target,
    median,
    operations,
    qkv,
    race,
    ratios,
    seconds,
)
from peers import _check

OURS = "linattn"
QUICK = _check.SHAPE[:2]  # what the check has compiled already serves `--quick` too
LIMIT = 8192  # positions beyond which softmax attention takes minutes
SLOWER = 0.97  # of their time: below this we lose, within it nobody knows


def load(
    report: Report, *names: str, gradients: bool = False, full_alone: Collection[str] = ()
) -> list[Any]:
    """Ours and these peers, each checked against the definition; empty without torch.

    full_alone: those whose causal form takes no part, and is not checked
    """
    found = []
    for name in ("ours", *names):
        module = peers.load(name)
        if module is None:
            if name == "ours":
                report.note("skipped: needs torch")
                return []
            report.note(f"skipped {name}: not installed")
            continue
        peer = replace(module.PEER, causal=None) if name in full_alone else module.PEER
        if name == "sdpa":
            _check.softmax(peer)
        elif name == "ggml":
            _check.forms(peer, feature_map="identity", normalize=False)
        else:
            _check.forms(peer)
        if gradients and name != "sdpa":
            _check.gradients(peer)
        if name != "ours":
            omits = f"; leaves out: {peer.omits}" * bool(peer.omits)
            report.note(f"{peer.name}: {peer.version}{omits}")
        found.append(peer)
    return found


def against(
    report: Report,
    label: str,
    times: Mapping[str, Sequence[float]],
    compared: Iterable[Any],
    targets: Mapping[str, Target] | None = None,
    **data: Any,
) -> list[Row]:
    """A row for each peer that took part: how much faster than it we are."""
    ours = times[OURS]
    return [
        report.row(
            f"{label}: faster than {peer.name}", ratios(times[peer.name], ours), "x",
            (targets or {}).get(peer.name), seconds(median(times[peer.name])), peer=peer.name,
            omits=peer.omits, ours=median(ours), theirs=median(times[peer.name]), **data,
        )
        for peer in compared
        if peer.name != OURS and peer.name in times
    ]  # fmt: skip


def passes(
    report: Report,
    o: Options,
    form: str,
    names: Iterable[str],
    cases: Iterable[tuple[int, int]],
    targets: Mapping[tuple[int, int], Mapping[str, Target]],
) -> None:
    """Forward passes of a form over (heads, n), all of these peers in one race."""
    compared = load(report, *names)
    if not compared:
        return
    causal = form == "causal"
    for heads, n in [QUICK] if o.quick else cases:
        report.heading(f"{form}, {heads} head{'s' * (heads > 1)} x {n:,}, float32, d = {D}")
        q, k, v = qkv(heads, n, D)
        sides = {
            peer.name: peer.side(q, k, v, causal=causal)
            for peer in compared
            if n <= LIMIT or "softmax" not in peer.omits
        }
        times = race({**sides, "matmul": report.machine.matmul}, o)
        ours = times[OURS]
        work = operations(n, heads)
        label = f"{heads} x {n:,}"
        report.row(
            f"{label}: share of the matmul rate", report.machine.share(work, ours, times["matmul"]),
            "", None, f"{seconds(median(ours))}, {work / median(ours) / 1e9:.1f} GFLOP/s",
            heads=heads, n=n,
        )  # fmt: skip
        against(
            report, label, times, compared, targets.get((heads, n)), heads=heads, n=n, form=form
        )
    losses(report)


def losses(report: Report) -> None:
    """Says where somebody else was faster."""
    lost = [r for r in report.rows if "peer" in r.data and r.value < SLOWER]
    if report.options.quick:
        return
    report.heading("where we lose" if lost else "we lose nowhere here")
    for row in lost:
        print(f"  {row.what}: {row.shown}, {seconds(row.data['ours'])} against {row.note}")
