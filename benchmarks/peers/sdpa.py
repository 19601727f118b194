"""torch's scaled_dot_product_attention: the softmax attention that most people run."""

from __future__ import annotations

import functools

import torch
from torch.nn.functional import scaled_dot_product_attention

from ._tensors import Tensors

VERSION = f"torch {torch.__version__}"

PEER = Tensors(
    "torch SDPA",
    VERSION,
    full=scaled_dot_product_attention,
    causal=functools.partial(scaled_dot_product_attention, is_causal=True),
    omits="softmax attention, another function",
)
side = PEER.side
