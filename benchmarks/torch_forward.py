"""How does the full forward pass on tensors compare with torch's ways and other libraries?

All sides get tensors made beforehand, in the layout that each wants, and run in inference mode in
one process and one race. Softmax attention is another function, and here for its time.
"""

from __future__ import annotations

import _torch
from _common import (
    D,
    Options,
    Report,
    at_least,
    median,
    operations,
    options,
    parser,
    qkv,
    race,
    seconds,
)

PEERS = ("eager", "compiled", "sdpa", "fast_transformers", "kornia", "performer")
TARGETS = {
    (8, 8192): {
        "torch eager": at_least(2.5),
        "torch.compile": at_least(1.3),
        "torch SDPA": at_least(80),
    }
}


def measure(report: Report, o: Options) -> None:
    compared = _torch.load(report, *PEERS)
    if not compared:
        return
    cases = [(8, 1024), (8, 8192), (1, 1024), (1, 8192), (1, 65536)]
    for heads, n in [(2, 128)] if o.quick else cases:
        report.heading(f"{heads} head{'s' * (heads > 1)} x {n:,}, float32, d = {D}")
        q, k, v = qkv(heads, n, D)
        sides = {
            peer.name: peer.side(q, k, v)
            for peer in compared
            if n <= _torch.LIMIT or "softmax" not in peer.omits
        }
        times = race({**sides, "matmul": report.machine.matmul}, o)
        ours = times[_torch.OURS]
        work = operations(n, heads)
        label = f"{heads} x {n:,}"
        report.row(
            f"{label}: share of the matmul rate", report.machine.share(work, ours, times["matmul"]),
            "", None, f"{seconds(median(ours))}, {work / median(ours) / 1e9:.1f} GFLOP/s",
            heads=heads, n=n,
        )  # fmt: skip
        _torch.against(
            report, label, times, compared, TARGETS.get((heads, n)), heads=heads, n=n, form="full"
        )
    _torch.losses(report)


def main() -> None:
    o = options(parser(__doc__).parse_args())
    report = Report("torch_forward", __doc__, o)
    measure(report, o)
    report.finish()


if __name__ == "__main__":
    main()
