"""Gradients without torch's operators: what `_ops` does, for eager calls on a CPU.

An operator of torch.library that is written in Python costs some hundred microseconds a call with
gradients, as much as attention over a thousand positions. Where nothing traces or intercepts, an
`autograd.Function` on the compiled core gives the same results for a tenth of that. Its derivative
is again the operator where that is to be differentiated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..backends import native
from . import _direct, _ops

__all__ = ["attend"]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, kv: Tensor | None, k_sum: Tensor | None,
        result: tuple[Any, ...], return_state: bool, inputs: tuple[Any, ...],
    ) -> Any:  # fmt: skip
        out, *after = result
        _ops.keep(ctx, (q, k, v, *inputs[3:10], kv, k_sum, *inputs[12:]), out, after)
        if not return_state:
            return out
        if after[2] is not None:
            ctx.mark_non_differentiable(after[2])
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        # The operator where the gradient is to be differentiated itself, or one of many.
        aside = torch.is_grad_enabled() or _direct.mapped(*grads)
        backward = _ops.attend_backward if aside else _ops.backward_cpu
        grad_out, grad_kv, grad_k_sum, *_ = (*grads, None, None)
        five = _ops.gradients(ctx, grad_out, grad_kv, grad_k_sum, backward)
        return (*five, None, None, None)


def attend(
    q: Tensor, k: Tensor, v: Tensor, feature_map: str, eps: float, causal: bool,
    key_mask: Tensor | None, cu_seqlens: Tensor | None, enable_gqa: bool, normalize: bool,
    sums: tuple[Tensor, Tensor, Tensor | None] | None, return_state: bool, order: str,
) -> Any:  # fmt: skip
    """What the core's verb gives, with a gradient, or None where it declines.

    The tensors are plain (see `_direct`), and a gradient is wanted.
    """
    keep = return_state or _worth_keeping(q, k, v, causal, order)
    result = native.attend(
        q, k, v, feature_map, eps, causal, key_mask, cu_seqlens, enable_gqa, normalize,
        sums, keep, order, None,
    )  # fmt: skip
    if result is None:
        return None
    four = result if keep else (result, None, None, None)
    kv, k_sum, log_scale = sums or (None, None, None)
    inputs = (
        q, k, v, feature_map, eps, causal, key_mask, cu_seqlens, enable_gqa, normalize,
        kv, k_sum, log_scale, keep, order,
    )  # fmt: skip
    return _Attend.apply(q, k, v, kv, k_sum, four, return_state, inputs)


def _worth_keeping(q: Tensor, k: Tensor, v: Tensor, causal: bool, order: str) -> bool:
    """Whether the gradient gets the state after all keys, or sums them up once more.

    It is kept where it is small beside the inputs, that memory beyond these stays some per cent.
    The causal form makes the states of its chunks anew in any case.
    """
    if causal or order == "quadratic":
        return False
    states = max(x.numel() // max(x.shape[-2] * x.shape[-1], 1) for x in (k, v))
    size = 8 * k.shape[-1] * (v.shape[-1] + 1) * states
    return 20 * size <= (q.numel() + k.numel() + v.numel()) * q.element_size()
