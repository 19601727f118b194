"""The formula as most people write it in torch, one operation after another."""

from __future__ import annotations

import torch
from torch import Tensor

from . import _tensors
from ._tensors import Tensors, elu1

VERSION = f"torch {torch.__version__}"


def attention(q: Tensor, k: Tensor, v: Tensor, eps: float = 1e-6) -> Tensor:
    """(..., n, d) -> (..., n, d_v)."""
    phi_q, phi_k = elu1(q), elu1(k)
    kv = phi_k.transpose(-1, -2) @ v
    k_sum = phi_k.sum(dim=-2)
    return (phi_q @ kv) / (phi_q @ k_sum[..., None] + eps)


def step(q: Tensor, k: Tensor, v: Tensor, kv: Tensor, k_sum: Tensor, eps: float = 1e-6) -> Tensor:
    """One position: (..., d) -> (..., d_v), kv and k_sum changed in place, in float32."""
    phi_q, phi_k = elu1(q), elu1(k)
    kv += phi_k[..., None] * v[..., None, :]
    k_sum += phi_k
    numerator = (phi_q[..., None, :] @ kv)[..., 0, :]
    return numerator / ((phi_q * k_sum).sum(-1, keepdim=True) + eps)


PEER = Tensors("torch eager", VERSION, full=attention)


class Step(_tensors.Recurrence):
    def __init__(self, heads: int, d: int) -> None:
        super().__init__(step, heads, d)
