"""pytorch-fast-transformers: its full, causal and recurrent linear attention, from its C++ kernel.

The layers' own `forward` is called, on tensors in the layout that they want. The causal form's
kernel takes the mapped queries and keys and runs position by position, one thread a head; before
and after it are operations of torch, as the package has them.

It builds from source: `PATH` without nvcc, `pip install --no-build-isolation --no-deps`; CXXFLAGS
of "-O3 -march=native" let its loops use this machine's vectors, as ours do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from fast_transformers.attention import CausalLinearAttention, LinearAttention
from fast_transformers.masking import FullMask, LengthMask, TriangularCausalMask
from fast_transformers.recurrent.attention import RecurrentLinearAttention
from torch import Tensor

from ._tensors import Tensors

VERSION = f"pytorch-fast-transformers {version('pytorch-fast-transformers')}"
D = 64

_full, _causal = LinearAttention(D), CausalLinearAttention(D)


# Neither form reads more of these masks than that they are full and triangular; larger ones would
# be n x n arrays.
_everything, _triangle = FullMask(1), TriangularCausalMask(1)


@functools.lru_cache
def _lengths(n: int) -> LengthMask:
    """All n positions take part."""
    return LengthMask(torch.full((1,), n, dtype=torch.long))


def full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _full(q, k, v, _everything, _lengths(q.shape[1]), _lengths(k.shape[1]))


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _causal(q, k, v, _triangle, _lengths(q.shape[1]), _lengths(k.shape[1]))


PEER = Tensors("fast-transformers", VERSION, full=full, causal=causal, positions_first=True)


class Step:
    """Its recurrent layer, state in float32."""

    def __init__(self, heads: int, d: int) -> None:
        self._layer, self._state = RecurrentLinearAttention(d), None

    def _next(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.inference_mode():
            out, self._state = self._layer(q, k, v, self._state)
        return out

    def side(self, q: Any, k: Any, v: Any) -> Callable[[], object]:
        return functools.partial(self._next, *(torch.from_numpy(x)[None] for x in (q, k, v)))

    def step(self, q: Any, k: Any, v: Any) -> Any:
        return self.side(q, k, v)()[0].numpy()
