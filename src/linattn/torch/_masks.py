"""The masks of `nn.MultiheadAttention`, in the words of `linear_attention`."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["is_causal", "key_mask"]


def key_mask(key_padding_mask: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """key_padding_mask, True or -inf for padding -> key_mask, True where a key takes part.

    shape: (N, S) -> (N, 1, S), or (S,) without a batch

    A float mask is added to softmax's scores. Only the two numbers 0 and -inf mean keeping and
    leaving out; other ones weigh a key, which is refused.
    """
    mask = key_padding_mask
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(
            "key_padding_mask: expected a boolean tensor, True for padding, or a float one of 0 "
            f"and -inf, got {kind}; a mask of 0 and 1 becomes one with .bool()"
        )
    if tuple(mask.shape) != shape:
        raise ValueError(
            f"key_padding_mask: expected shape {shape}, one entry for each key, got "
            f"{tuple(mask.shape)}"
        )
    if mask.dtype == torch.bool:
        keep = ~mask
    else:
        keep = mask == 0
        known = (keep | (mask == -torch.inf)).all()
        message = (
            "key_padding_mask: expected only 0 and -inf in a float mask, as there are no scores to "
            "add other numbers to; pass a boolean mask, True for padding"
        )
        if torch.compiler.is_compiling():  # no look at values while tracing; the graph looks
            torch._assert_async(known, message)
        elif not known:
            raise ValueError(message)
    return keep if len(shape) == 1 else keep[:, None]


def is_causal(attn_mask: Tensor | None, hint: bool, n_q: int, n_k: int) -> bool:
    """Whether a call is causal: by the hint, or by a mask that allows the past and no more.

    attn_mask: (n_q, n_k), or (N * num_heads, n_q, n_k); True or -inf where a query must not look

    As in `nn.MultiheadAttention` the hint tells what the mask is: its numbers aren't read then.
    Without it they are, and a mask that is neither causal nor empty is refused.
    """
    if attn_mask is None:
        return hint
    mask = attn_mask
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(
            "attn_mask: expected a boolean tensor, True where a query must not look, or a float "
            f"one of 0 and -inf, got {kind}"
        )
    if mask.dim() not in (2, 3) or tuple(mask.shape[-2:]) != (n_q, n_k):
        raise ValueError(
            f"attn_mask: expected shape {(n_q, n_k)}, or that behind an axis of batch and heads, "
            f"got {tuple(mask.shape)}"
        )
    if hint:
        return True
    blocked = mask if mask.dtype == torch.bool else mask == -torch.inf
    if mask.dtype == torch.bool or bool((blocked | (mask == 0)).all()):
        ahead = torch.ones(n_q, n_k, dtype=torch.bool, device=mask.device).triu(1)
        if n_q == n_k and bool((blocked == ahead).all()):
            return True
        if not bool(blocked.any()):
            return False
    raise ValueError(
        "attn_mask: expected None or a causal mask, got another one; linear attention never has "
        "the weights that it would change. For padding pass key_padding_mask, for the past alone "
        "is_causal=True"
    )
