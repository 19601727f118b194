"""Is any short sequence of tensors slower than with torch's own operations?

n = 16 ... 256, one head and eight, in inference mode, many calls in a row, against the eager
formula and softmax attention.
"""

from __future__ import annotations

import _torch
from _common import D, Options, Report, at_least, qkv, race, run


def measure(report: Report, o: Options) -> None:
    compared = _torch.load(report, "eager", "sdpa")
    if not compared:
        return
    for heads in (1, 8):
        for form in ("full", "causal"):
            taken = [peer for peer in compared if form in peer.forms]
            report.heading(f"{form}, {heads} head{'s' * (heads > 1)} x n, float32, d = {D}")
            for n in (16, 64) if o.quick else (16, 32, 64, 128, 256):
                q, k, v = qkv(heads, n, D)
                causal = form == "causal"
                times = race({peer.name: peer.side(q, k, v, causal=causal) for peer in taken}, o)
                _torch.against(
                    report, f"{form}, {heads} x {n}", times, taken,
                    {peer.name: at_least(1.0) for peer in taken}, heads=heads, n=n, form=form,
                )  # fmt: skip
    _torch.losses(report)


if __name__ == "__main__":
    run("torch_short", __doc__, measure)
