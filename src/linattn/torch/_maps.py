"""The fused feature maps in torch operations, with the derivatives that the compiled core has.

At the kinks: phi'(0) is 1 for `elu1`, whose two sides agree, and 0 for `relu`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..feature_maps import EXPONENTIAL, signs
from ..feature_maps._base import said

__all__ = ["apply", "slope"]

torch.compiler.assume_constant_result(said)  # which parses, what torch.compile can't follow


def apply(kernel: str, x: Tensor) -> Tensor:
    """phi(x) in the precision of x; any number of derivatives are right."""
    if kernel == "identity":
        return x
    if kernel == "elu1":
        # The branch that isn't taken is finite, so that its gradient is 0 and never 0 * inf.
        return torch.where(x >= 0, x + 1, torch.exp(x.clamp(max=0)))
    if kernel == "relu":
        return torch.relu(x)
    if kernel == "squared_relu":
        return torch.relu(x) * torch.relu(x)
    if kernel == "exp":
        return torch.exp(x)
    if kernel == "signed_exp":
        return torch.exp(x) * signs(torch, x)
    if kernel == "softplus":
        return torch.logaddexp(x, torch.zeros_like(x))
    return torch.sigmoid(x)


def slope(kernel: str, x: Tensor, phi: Tensor) -> Tensor | float:
    """phi'(x), from x and phi(x)."""
    if kernel == "identity":
        return 1.0
    if kernel == "elu1":
        return phi.clamp(max=1)  # exp(x) below 0, and phi >= 1 from there
    if kernel == "relu":
        return torch.where(x <= 0, 0.0, torch.where(x > 0, 1.0, x))  # NaN passes
    if kernel == "squared_relu":
        return 2 * torch.relu(x)
    if kernel in EXPONENTIAL:
        return phi
    if kernel == "softplus":
        return torch.sigmoid(x)
    return phi * torch.sigmoid(-x)  # 1 - phi would cancel
