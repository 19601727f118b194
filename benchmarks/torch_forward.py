"""How does the full forward pass on tensors compare with torch's ways and other libraries?

All sides get tensors made beforehand, in the layout that each wants, and run in inference mode in
one process and one race. Softmax attention is another function, and here for its time.
"""

from __future__ import annotations

import _torch
from _common import Options, Report, at_least, run

PEERS = ("eager", "compiled", "sdpa", "fast_transformers", "kornia", "performer")
CASES = ((8, 1024), (8, 8192), (1, 1024), (1, 8192), (1, 65536))
TARGETS = {
    (8, 8192): {
        "torch eager": at_least(2.5),
        "torch.compile": at_least(1.3),
        "torch SDPA": at_least(80),
    }
}


def measure(report: Report, o: Options) -> None:
    _torch.passes(report, o, "full", PEERS, CASES, TARGETS)


if __name__ == "__main__":
    run("torch_forward", __doc__, measure)
