"""What does a call on torch's tensors cost over the same on arrays, with gradients and without?

On tensors of one element the kernels have next to nothing to do, so that the whole call is what
Python, the checks and torch take. Beside it the cheapest things that torch does, and its own
operations for the same formula.
"""

from __future__ import annotations

from collections.abc import Callable

import peers
from _common import Options, Report, at_most, race, run

from linattn import State, linear_attention
from linattn.backends import native


def measure(report: Report, o: Options) -> None:
    eager, sdpa, ours = (peers.load(name) for name in ("eager", "sdpa", "ours"))
    if eager is None or sdpa is None or ours is None:
        report.note("skipped: needs torch")
        return
    import torch

    x = torch.ones(1, 1)
    array = x.numpy()
    four = torch.ones(1, 1, 1, 1)
    leaf = torch.ones(1, 1, requires_grad=True)
    upstream = torch.ones(1, 1)
    attend = ("elu1", 1e-6, False, None, None, False, True, None, False, "auto", None)
    of_arrays, of_tensors = State.zeros((), 1, 1), State.of(x, x)

    def unrecorded(call: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            with torch.inference_mode():
                return call()

        return run

    def backward(call: Callable[[], torch.Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(call(), leaf, upstream)

    sides: dict[str, Callable[[], object]] = {
        "the core's attend, arrays": lambda: native.attend(array, array, array, *attend),
        "the core's attend, tensors": lambda: native.attend(x, x, x, *attend),
        "linear_attention, arrays": lambda: linear_attention(array, array, array),
        "linear_attention, tensors": lambda: linear_attention(x, x, x),
        "the same, causal": lambda: linear_attention(x, x, x, causal=True),
        "the same, (1, 1, 1, 1)": lambda: linear_attention(four, four, four),
        "the same, in inference mode": unrecorded(lambda: linear_attention(x, x, x)),
        "State.step, arrays": lambda: of_arrays.step(array, array, array),
        "State.step, tensors": lambda: of_tensors.step(x, x, x),
        "with gradients: forward": lambda: linear_attention(leaf, leaf, leaf),
        "with gradients: both": backward(lambda: linear_attention(leaf, leaf, leaf)),
        "torch.empty((1, 1))": lambda: torch.empty((1, 1)),
        "torch.matmul(x, x)": lambda: torch.matmul(x, x),
        "torch's formula": lambda: eager.attention(x, x, x),
        "torch's formula, with gradients: forward": lambda: eager.attention(leaf, leaf, leaf),
        "torch's formula, with gradients: both": backward(
            lambda: eager.attention(leaf, leaf, leaf)
        ),
        "torch SDPA": lambda: sdpa.PEER.full(four, four, four),
    }
    report.heading("microseconds a call, tensors of one element")
    times = race(sides, o)
    judged = {"linear_attention, tensors": at_most(5.0), "State.step, tensors": at_most(5.0)}
    for name, values in times.items():
        report.row(name, [1e6 * t for t in values], "us", judged.get(name))
    report.heading("of it")
    for what, above, below in (
        ("a tensor's over an array's", "linear_attention, tensors", "linear_attention, arrays"),
        ("Python, over the core's verb", "linear_attention, tensors", "the core's attend, tensors"),
        ("a step of tensors over one of arrays", "State.step, tensors", "State.step, arrays"),
        ("gradients, forward alone", "with gradients: forward", "linear_attention, tensors"),
        ("gradients, both", "with gradients: both", "linear_attention, tensors"),
    ):
        differences = [1e6 * (a - b) for a, b in zip(times[above], times[below], strict=True)]
        report.row(what, differences, "us")


if __name__ == "__main__":
    run("torch_overhead", __doc__, measure)
