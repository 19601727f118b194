"""What does one decoding step cost from Python, in torch and in other libraries?

One token for every head: absorb its key and value, then query. Ours keeps its sums in float64, all
others in float32. ggml and ONNX Runtime have no feature map, ggml no denominator either, and their
inputs lie ready; the rest take tensors.
"""

from __future__ import annotations

from typing import Any

import _torch
import peers
from _common import (
    Options,
    Report,
    at_least,
    median,
    qkv,
    race,
    ratios,
    run,
    seconds,
)

from linattn import State

NAMES = {
    "eager": "torch eager",
    "compiled": "torch.compile",
    "fast_transformers": "fast-transformers",
    "ort": "ONNX Runtime",
    "ggml": "ggml",
}
CHECKED = (3, 64)  # heads and width of the check, so that `--quick` compiles nothing more
OMITS = {"ggml": "feature map, denominator", "ort": "feature map, division"}


class Named:
    """A peer as `_torch.against` takes it."""

    def __init__(self, key: str) -> None:
        self.name, self.omits = NAMES[key], OMITS.get(key, "")


def load(report: Report) -> dict[str, Any]:
    """The adapters that are there, each checked; empty without torch."""
    from peers import _check

    found = {key: module for key in ("ours", *NAMES) if (module := peers.load(key)) is not None}
    if "ours" not in found:
        report.note("skipped: needs torch")
        return {}
    for key, module in found.items():
        plain = {"feature_map": "identity", "normalize": False} if key == "ggml" else {}
        _check.steps(NAMES.get(key, "linattn"), module.Step(*CHECKED).step, **plain)
        if key != "ours":
            omits = f"; leaves out: {OMITS[key]}" if key in OMITS else ""
            report.note(f"{NAMES[key]}: {module.VERSION}{omits}")
    return found


def measure(report: Report, o: Options) -> None:
    found = load(report)
    if not found:
        return
    for heads, d in (CHECKED,) if o.quick else ((8, 64), (1, 64), (32, 64)):
        report.heading(f"one step, {heads} head{'s' * (heads > 1)} x {d}, float32")
        q, k, v = qkv(heads, 1, d)
        flat = [x[:, 0].copy() for x in (q, k, v)]
        state = State.zeros((heads,), d, d)
        sides = {
            NAMES.get(key, _torch.OURS): module.Step(heads, d).side(*flat)
            for key, module in found.items()
        }
        times = race({**sides, "of arrays": lambda s=state, x=(q, k, v): s.step(*x)}, o)
        ours = times[_torch.OURS]
        label = f"{heads} x {d}"
        report.row(f"{label}: our step of tensors", [1e6 * t for t in ours], "us")
        report.row(
            f"{label}: time over that of arrays", ratios(ours, times["of arrays"]), "x", None,
            seconds(median(times["of arrays"])),
        )  # fmt: skip
        # ggml's step may take 1.2 times less than ours; nobody else should be faster.
        targets = {"ggml": at_least(1 / 1.2)} if (heads, d) == (8, 64) else {}
        _torch.against(
            report, label, times, map(Named, filter(NAMES.get, found)), targets,
            heads=heads, n=1, form="step",
        )  # fmt: skip
    _torch.losses(report)


if __name__ == "__main__":
    run("torch_decode", __doc__, measure)
