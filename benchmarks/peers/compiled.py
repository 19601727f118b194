"""torch.compile of the eager formula, of the chunked causal form and of the step.

Compiled for each shape (`dynamic=False`) and in one graph, so that nothing falls back silently.
Of the causal form it is the one with all chunks at once: the compiler would unroll the loop.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch._inductor.compile_fx  # which warns of itself: here `load` keeps that quiet
from torch import Tensor

from . import _tensors, chunked, eager
from ._tensors import Tensors

VERSION = eager.VERSION

torch._dynamo.config.recompile_limit = 64  # a shape each; beyond it fullgraph makes an error


def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, fullgraph=True, dynamic=False)


PEER = Tensors(
    "torch.compile", VERSION, full=_compiled(eager.attention), causal=_compiled(chunked.at_once)
)
_step = _compiled(eager.step)


class Step(_tensors.Recurrence):
    def __init__(self, heads: int, d: int) -> None:
        super().__init__(_step, heads, d)
