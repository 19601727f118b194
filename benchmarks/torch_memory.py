"""How much memory do gradients take beyond inputs, output and the gradients themselves?

Each number is the peak of a process of its own over one forward and one backward pass, less what it
held before, the output and three gradients. A tiny pass before warms up threads and libraries:
here the question is what grows. The causal form on tensors, without gradients, the same way.
"""

from __future__ import annotations

import sys
from typing import Any

import _torch
import peers
from _common import (
    MEBI,
    NO_PEAK,
    D,
    Options,
    Report,
    apart,
    at_most,
    forget_peak,
    peak,
    qkv,
    run,
)


def child(_: Options, case: dict[str, Any]) -> int:
    """The bytes that a case takes in this process."""
    module = peers.load(case["peer"])
    assert module is not None
    import torch

    peer, causal, heads = module.PEER, case["form"] == "causal", case["heads"]

    def taken(n: int) -> int:
        inputs = list(peer.tensors(*qkv(heads, n, D)))
        (upstream,) = peer.tensors(qkv(heads, n, D, seed=1)[2])
        function = peer.function(causal)
        before = forget_peak()
        if case["gradients"]:
            inputs = [x.requires_grad_() for x in inputs]
            out = function(*inputs)
            made = [out, *torch.autograd.grad(out, inputs, upstream)]
        else:
            with torch.inference_mode():
                made = [function(*inputs)]
        return peak() - before - sum(x.nbytes for x in made)

    taken(256)
    return taken(case["n"])


def measure(report: Report, o: Options) -> None:
    if sys.platform == "win32":
        report.note(NO_PEAK)
        return
    compared = _torch.load(report, "eager", "chunked", "fast_transformers")
    if not compared:
        return

    def measured(**case: Any) -> int:
        return int(apart(__file__, case, o))

    keys = {"linattn": "ours", "torch eager": "eager", "torch in chunks": "chunked"}
    few = 128 if o.quick else 8192
    many = 16 * few
    times = 1 if o.quick else 3
    for form in ("full", "causal"):
        # Each number takes a process that imports torch: quickly, ours and one other are enough.
        taking = [peer for peer in compared if form in peer.forms][: 2 if o.quick else None]
        for heads, n in ((8, 2 * few),) if o.quick else ((1, many), (8, 2 * few)):
            inputs = 3 * heads * n * D * 4
            report.heading(f"{form}, forward and backward, {heads} x {n:,}, float32")
            for peer in taking:
                case = {
                    "peer": keys.get(peer.name, "fast_transformers"),
                    "form": form, "heads": heads, "n": n, "gradients": True,
                }  # fmt: skip
                ours = peer.name == _torch.OURS
                taken = [measured(**case) / MEBI for _ in range(times if ours else 1)]
                # One number a row, and a few per cent of the inputs.
                most = (heads * n * 4 + 0.05 * inputs) / MEBI
                report.row(
                    f"{form}, {heads} x {n:,}: {peer.name}", taken, "MiB",
                    at_most(most) if ours else None,
                    f"inputs {inputs / MEBI:.0f} MiB: {taken[0] * MEBI / inputs:.1%} of them",
                    heads=heads, n=n, form=form,
                )  # fmt: skip
    report.heading("without gradients, 1 x n, causal")
    case = {"peer": "ours", "form": "causal", "heads": 1, "gradients": False}
    lengths = (few, many)
    got = [[measured(n=n, **case) / MEBI for _ in range(times)] for n in lengths]
    for n, taken in zip(lengths, got, strict=True):
        report.row(f"causal forward, 1 x {n:,}", taken, "MiB", None, n=n, heads=1)
    report.row(
        "causal forward, 1 x n: growth to 16 n", min(got[1]) - min(got[0]), "MiB", at_most(0.25)
    )


if __name__ == "__main__":
    run("torch_memory", __doc__, measure, child=child)
