"""How does the causal forward pass on tensors compare with torch's ways and other libraries?

In inference mode, tensors made beforehand, one race. ONNX Runtime and ggml compute less than we
do: neither has the feature map, and of the division ONNX Runtime has the sums (a column of ones in
v) and ggml nothing; what they leave out is not timed.
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

PEERS = ("chunked", "compiled", "fast_transformers", "performer", "ort", "ggml", "sdpa")
TARGETS = {
    (8, 8192): {
        "torch in chunks": at_least(5),
        "fast-transformers": at_least(5),
        "torch SDPA": at_least(40),
    },
    (8, 4096): {"ONNX Runtime": at_least(1.5)},
}


def measure(report: Report, o: Options) -> None:
    compared = _torch.load(report, *PEERS)
    if not compared:
        return
    cases = [(8, 1024), (8, 4096), (8, 8192), (1, 65536)]
    for heads, n in [(2, 128)] if o.quick else cases:
        report.heading(f"{heads} head{'s' * (heads > 1)} x {n:,}, causal, float32, d = {D}")
        q, k, v = qkv(heads, n, D)
        sides = {
            peer.name: peer.side(q, k, v, causal=True)
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
            report, label, times, compared, TARGETS.get((heads, n)), heads=heads, n=n, form="causal"
        )
    _torch.losses(report)


def main() -> None:
    o = options(parser(__doc__).parse_args())
    report = Report("torch_causal", __doc__, o)
    measure(report, o)
    report.finish()


if __name__ == "__main__":
    main()
