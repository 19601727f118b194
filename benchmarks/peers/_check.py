"""Does a peer compute what it is taken for? Or the comparison would mean nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
from _common import qkv

from linattn import softmax_attention
from linattn.reference import double_sum

SHAPE = (3, 256, 64)  # heads, positions (whole chunks), features
ENOUGH = 2e-5  # of the largest element: float32, whatever the order of its sums


def forms(peer: Any, *, feature_map: Any = "elu1", eps: float = 1e-6, **options: Any) -> None:
    """All forms of it against the definition in float64."""
    q, k, v = qkv(*SHAPE, seed=7)
    for form in peer.forms:
        want = double_sum(q, k, v, feature_map, eps, causal=form == "causal", **options)
        _judge(peer.name, form, peer.answer(q, k, v, causal=form == "causal"), want)


def softmax(peer: Any) -> None:
    q, k, v = (x.astype(np.float64) for x in qkv(*SHAPE, seed=7))
    for form in peer.forms:
        causal = form == "causal"
        want = softmax_attention(q, k, v, causal=causal)
        got = peer.answer(*qkv(*SHAPE, seed=7), causal=causal)
        _judge(peer.name, form, got, want)


def gradients(peer: Any) -> None:
    """Its gradients against torch's own of the definition, in float64."""
    import torch

    q, k, v = qkv(*SHAPE, seed=7)
    for form in peer.forms:
        causal = form == "causal"
        x, y, z = (torch.from_numpy(a).double().requires_grad_() for a in (q, k, v))
        phi_x, phi_y = (torch.where(a < 0, a.clamp(max=0).exp(), a + 1) for a in (x, y))
        scores = phi_x @ phi_y.mT
        scores = scores.tril() if causal else scores
        out = (scores @ z) / (scores.sum(-1, keepdim=True) + 1e-6)
        wanted = torch.autograd.grad(out, (x, y, z), torch.from_numpy(v).double())
        got = peer.answer_gradients(q, k, v, causal=causal)
        for name, a, b in zip("qkv", got, wanted, strict=True):
            _judge(peer.name, f"{form}, gradient of {name}", a, b.numpy())


def steps(name: str, theirs: Any, *, feature_map: str = "elu1", normalize: bool = True) -> None:
    """Some steps one after another against the causal definition; theirs: step(q, k, v)."""
    heads, n, d = 3, 5, 64
    q, k, v = qkv(heads, n, d, seed=7)
    want = double_sum(q, k, v, feature_map, 1e-6, causal=True, normalize=normalize)
    for t in range(n):
        one = (np.ascontiguousarray(x[:, t]) for x in (q, k, v))
        _judge(name, f"step {t}", theirs(*one), want[:, t])


def _judge(name: str, what: str, got: Any, want: Any) -> None:
    off = float(np.abs(got - want).max() / np.abs(want).max())
    if got.shape != want.shape or not off <= ENOUGH:
        raise SystemExit(f"{name}, {what}: not what this adapter takes it for, off by {off:.1e}")
