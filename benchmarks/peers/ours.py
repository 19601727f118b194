"""linattn on torch's tensors, called and checked as the others are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import linattn
from linattn import State, linear_attention

from ._tensors import Tensors

VERSION = f"linattn {linattn.__version__}"

PEER = Tensors(
    "linattn",
    VERSION,
    full=linear_attention,
    causal=functools.partial(linear_attention, causal=True),
)


class Step:
    """A state of tensors."""

    def __init__(self, heads: int, d: int) -> None:
        one = torch.zeros(heads, 0, d)
        self._state = State.of(one, one)

    def side(self, q: Any, k: Any, v: Any) -> Callable[[], object]:
        inputs = [torch.from_numpy(x)[:, None] for x in (q, k, v)]
        return functools.partial(self._state.step, *inputs)

    def step(self, q: Any, k: Any, v: Any) -> Any:
        inputs = [torch.from_numpy(x)[:, None] for x in (q, k, v)]
        return self._state.step(*inputs)[:, 0].numpy()
