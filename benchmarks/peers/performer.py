"""performer-pytorch: its linear attention functions and its kernel for generalized attention.

The kernel is `generalized_kernel` with elu(x) + 1 as its function, no projection, no scaling and
nothing added, so that the formula is ours; with its own random features it would be another one
and have a matrix product more. The causal form is the one that its `FastAttention` takes on a CPU.
"""

from __future__ import annotations

import functools
from importlib.metadata import version

from performer_pytorch.performer_pytorch import (
    causal_linear_attention_noncuda,
    generalized_kernel,
    linear_attention,
)
from torch import Tensor

from ._tensors import Tensors, elu1

VERSION = f"performer-pytorch {version('performer-pytorch')}"

_map = functools.partial(
    generalized_kernel,
    projection_matrix=None,
    kernel_fn=elu1,
    kernel_epsilon=0.0,
    normalize_data=False,
)


def full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return linear_attention(_map(q), _map(k), v)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return causal_linear_attention_noncuda(_map(q), _map(k), v)


PEER = Tensors("performer-pytorch", VERSION, full=full, causal=causal)
