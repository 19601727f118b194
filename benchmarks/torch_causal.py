"""How does the causal forward pass on tensors compare with torch's ways and other libraries?

In inference mode, tensors made beforehand, one race. ONNX Runtime and ggml compute less than we
do: neither has the feature map, and of the division ONNX Runtime has the sums (a column of ones in
v) and ggml nothing; what they leave out is not timed.
"""

from __future__ import annotations

import _torch
from _common import Options, Report, at_least, run

PEERS = ("chunked", "compiled", "fast_transformers", "performer", "ort", "ggml", "sdpa")
CASES = ((8, 1024), (8, 4096), (8, 8192), (1, 65536))
TARGETS = {
    (8, 8192): {
        "torch in chunks": at_least(5),
        "fast-transformers": at_least(5),
        "torch SDPA": at_least(40),
    },
    (8, 4096): {"ONNX Runtime": at_least(1.5)},
}


def measure(report: Report, o: Options) -> None:
    _torch.passes(report, o, "causal", PEERS, CASES, TARGETS)


if __name__ == "__main__":
    run("torch_causal", __doc__, measure)
