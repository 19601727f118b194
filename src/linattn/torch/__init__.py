"""Linear attention of PyTorch tensors: `linattn.linear_attention` and `linattn.State` take them.

This package is imported when they meet the first tensor. Import it yourself for what only torch
has: layers, maps to be trained, and the swap of a model's attention.
"""

from __future__ import annotations

from torch import Tensor

from . import _arguments, _maps, _ops
from ._attention import linear_attention, softmax_attention
from ._layers import LinearAttention
from ._learned import hedgehog, performer_learned, t2r
from ._linearize import linearize_
from ._state import TensorState

__all__ = ["LinearAttention", "hedgehog", "linearize_", "performer_learned", "t2r"]


class front:
    """What the core asks of a front end."""

    linear_attention = staticmethod(linear_attention)
    softmax_attention = staticmethod(softmax_attention)
    State = TensorState

    @staticmethod
    def apply(kernel: str, x: Tensor) -> Tensor:
        """A fused map's last step, in at least float32, rounded to x's dtype once."""
        from torch import float32, float64

        wide = x if x.dtype == float64 else x.to(float32)
        return _maps.apply(kernel, wide).to(x.dtype)

    constant = staticmethod(_arguments.constant)
    directions = staticmethod(_ops.drawn)
    readable = staticmethod(_arguments.readable)


def __dir__() -> list[str]:
    return __all__
