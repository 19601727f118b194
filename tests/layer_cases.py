"""What the tests of layers share: the definition of a whole layer, and a map that learns."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from linattn import reference

Array = Any

CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # float32, through three matrix products


def attention(
    layer: Any,
    query: Any,
    key: Any,
    value: Any,
    keep: Array | None = None,
    causal: bool = False,
) -> Array:
    """The whole layer by the definition in float64; (N, L, E), whatever batch_first says.

    keep: (N, S), True where a key takes part
    """
    w = {name: np.asarray(p.detach().double()) for name, p in layer.named_parameters()}
    E, d = layer.embed_dim, layer.head_dim
    H, H_kv = layer.num_heads, getattr(layer, "num_kv_heads", layer.num_heads)
    cuts = [E, E + H_kv * d]
    if "in_proj_weight" in w:
        weights = np.split(w["in_proj_weight"], cuts)
    else:
        weights = [w[f"{name}_proj_weight"] for name in "qkv"]
    biases = np.split(w.get("in_proj_bias", np.zeros(E + 2 * H_kv * d)), cuts)
    x = [np.asarray(t.detach().double()) for t in (query, key, value)]
    q, k, v = (t @ W.T + b for t, W, b in zip(x, weights, biases, strict=True))
    batch, n_k = k.shape[:2]
    keep = np.ones((batch, n_k), bool) if keep is None else np.asarray(keep)
    if "bias_k" in w:
        k, v = (
            np.concatenate([np.broadcast_to(w[name], (batch, 1, H_kv * d)), t], axis=1)
            for name, t in (("bias_k", k), ("bias_v", v))
        )
        keep = np.concatenate([np.ones((batch, 1), bool), keep], axis=1)
    out = np.zeros((batch, q.shape[1], E))
    for b in range(batch):
        for h in range(H):
            g = h // (H // H_kv)
            mine, theirs = slice(h * d, (h + 1) * d), slice(g * d, (g + 1) * d)
            for i in range(q.shape[1]):
                last = i + 1 + ("bias_k" in w) if causal else k.shape[1]
                seen = np.flatnonzero(keep[b, :last])
                out[b, i : i + 1, mine] = reference.double_sum(
                    q[b, i : i + 1, mine], k[b, seen][:, theirs], v[b, seen][:, theirs]
                )
    return out @ w["out_proj.weight"].T + w.get("out_proj.bias", 0.0)


class Learned(nn.Module):
    def __init__(self, width: int, D: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, D)

    def forward(self, x: Any) -> Any:
        return nn.functional.softplus(self.linear(x))
