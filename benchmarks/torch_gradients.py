"""What do gradients cost: forward and backward, full and causal, ours and those of others?

The rate counts 12 n D d_v operations a head: the two products of the forward pass and the four of
its gradients, none of them twice. Tensors and a dense upstream gradient are made beforehand; what
is timed is a forward pass that records and `torch.autograd.grad` for q, k and v.
"""

from __future__ import annotations

import _torch
from _common import (
    D,
    Options,
    Report,
    at_least,
    at_most,
    median,
    operations,
    qkv,
    race,
    ratios,
    run,
    seconds,
)

FULL = ("eager", "compiled", "fast_transformers", "kornia", "performer", "sdpa")
# Not torch.compile, which compiles that for minutes.
CAUSAL = ("chunked", "fast_transformers", "performer", "sdpa")
# Those whose gradients take n x n or n x D x d_v numbers: no further than this many rows of all
# heads together.
HEAVY = {"torch SDPA": 8 * 1024, ("causal", "performer-pytorch"): 8 * 1024}


def measure(report: Report, o: Options) -> None:
    names = dict.fromkeys([*FULL, *CAUSAL])
    everyone = _torch.load(report, *names, gradients=True, full_alone={*FULL} - {*CAUSAL})
    if not everyone:
        return
    cases = [(8, 1024), (8, 8192), (1, 65536)]
    for form in ("full", "causal"):
        causal = form == "causal"
        compared = [peer for peer in everyone if form in peer.forms]
        for heads, n in [_torch.QUICK] if o.quick else cases:
            report.heading(f"{form}, {heads} head{'s' * (heads > 1)} x {n:,}, float32, d = {D}")
            q, k, v = qkv(heads, n, D)
            taken = [
                peer for peer in compared
                if heads * n <= HEAVY.get(peer.name, HEAVY.get((form, peer.name), heads * n))
            ]  # fmt: skip
            ours = everyone[0]
            times = race(
                {
                    **{peer.name: peer.gradients(q, k, v, causal=causal) for peer in taken},
                    "forward": ours.side(q, k, v, causal=causal),
                    "recorded": ours.recorded(q, k, v, causal=causal),
                    "matmul": report.machine.matmul,
                },
                o,
            )
            both = times[_torch.OURS]
            work = 3 * operations(n, heads)
            label = f"{form}, {heads} x {n:,}"
            report.row(
                f"{label}: share of the matmul rate",
                report.machine.share(work, both, times["matmul"]), "",
                None if causal else at_least(0.70),
                f"{seconds(median(both))}, {work / median(both) / 1e9:.1f} GFLOP/s",
                heads=heads, n=n, form=form,
            )  # fmt: skip
            report.row(
                f"{label}: time over own forward", ratios(both, times["forward"]), "x",
                at_most(4.2) if causal else None, f"forward {seconds(median(times['forward']))}",
                heads=heads, n=n, form=form,
            )  # fmt: skip
            report.row(
                f"{label}: of it the forward pass that records",
                ratios(times["recorded"], both), "", None, seconds(median(times["recorded"])),
                heads=heads, n=n, form=form,
            )  # fmt: skip
            _torch.against(
                report, label, times, taken, {} if causal else {"torch eager": at_least(2.5)},
                heads=heads, n=n, form=f"{form}, gradients",
            )  # fmt: skip
    _torch.losses(report)


if __name__ == "__main__":
    run("torch_gradients", __doc__, measure)
