"""`linear_attention` and `softmax_attention` of tensors: checks, and the choice of a road.

Roads that lead to the same numbers:

- direct: nothing differentiates, traces or intercepts, and the tensors lie in this machine's
  memory; the compiled core is called without torch's dispatcher
- operator: `torch.ops.linattn.attend`, which torch differentiates, compiles and exports
- composite: torch operations, for the transforms of torch.func and forward-mode derivatives
- closed: maps with a closed form, in blocks and without their features; torch operations too
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import _check, feature_maps
from ..backends import native
from ..feature_maps import FeatureMap
from ..plan import closed_order
from . import _arguments, _closed, _closed_ops, _direct, _eager  # noqa: F401  operators
from ._composite import Sums
from ._roads import expanded, into
from ._state import TensorState

__all__ = ["linear_attention", "softmax_attention"]

_INFINITY = float("inf")
_FUSED: dict[Any, FeatureMap] = {None: feature_maps.elu1}
for _name in feature_maps.names():
    _FUSED[_name] = _FUSED[feature_maps.get(_name)] = feature_maps.get(_name)

_plain = _direct.plain
_calm = _direct.calm


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature_map: Any,
    eps: float | None,
    causal: bool,
    key_mask: Tensor | None,
    cu_seqlens: Any,
    enable_gqa: bool,
    normalize: bool,
    state: Any,
    return_state: bool,
    order: str,
    out: Tensor | None,
) -> Any:
    """`linattn.linear_attention`, which documents the arguments."""
    # Straight to the compiled core, which takes a call only if everything fits.
    if _calm():
        try:
            found = _FUSED.get(feature_map)
            grad = torch.is_grad_enabled()
            # Gradients of q, k and v alone have a short road too.
            wanted = grad and (q.requires_grad or k.requires_grad or v.requires_grad)
            if found is None and not wanted and isinstance(feature_map, (str, FeatureMap)):
                found = feature_maps.get(feature_map)
            if (
                found is not None
                and _plain(q, False)
                and _plain(k, False)
                and _plain(v, False)
                and (key_mask is None or _plain(key_mask, grad))
                and (eps is None or (type(eps) is float and 0.0 <= eps < _INFINITY))
                and (order != "quadratic" or not (causal or return_state or state is not None))
                and (
                    state is None
                    or (
                        type(state) is TensorState
                        and (state.feature_map is found or state.feature_map == found)
                        and state.dtype is q.dtype
                        and state._plain(grad)
                    )
                )
                and (out is None or (_plain(out, grad) and not out.requires_grad and not wanted))
                and not (wanted and isinstance(cu_seqlens, (list, tuple)))
                and (whole := found.kernel if found.project is None else native.fused(found, k))
            ):
                number = found.eps if eps is None else eps
                sums = None if state is None else (state.kv, state.k_sum, state.log_scale)
                if wanted:
                    result = _eager.attend(
                        q, k, v, found.kernel, number, causal, key_mask, cu_seqlens, enable_gqa,
                        normalize, sums, return_state, order,
                    )  # fmt: skip
                else:
                    result = native.attend(
                        q, k, v, whole, number, causal, key_mask, cu_seqlens, enable_gqa,
                        normalize, sums, return_state, order, out,
                    )  # fmt: skip
                if result is not None:
                    if return_state:
                        answer, *after = result
                        return answer, TensorState(after[0], after[1], after[2], found, q.dtype)
                    return result
        except (TypeError, AttributeError):  # an unhashable callable, a flag or array that is none
            pass
    found = feature_maps.get(feature_map)
    number = _check.eps(eps, found.eps)
    causal = _check.flag("causal", causal)
    enable_gqa = _check.flag("enable_gqa", enable_gqa)
    normalize = _check.flag("normalize", normalize)
    return_state = _check.flag("return_state", return_state)
    linear = _check.order(order, causal, state is not None, return_state)
    shape = None
    q, k, v = _arguments.rows(q=q, k=k, v=v)
    if state is not None:
        if not isinstance(state, TensorState):
            raise _check.unfit_state(state, "torch tensors", "State.of(k, v) of tensors")
        _check.same_map(found, state.feature_map, "state")
        _arguments.fit(q, state)
        shape = state._shape
    n = q.shape[-2]
    _check.lengths(
        tuple(q.shape), tuple(k.shape), tuple(v.shape), causal=causal, cut=cu_seqlens is not None,
        remedy="pass the earlier keys as a state",
    )  # fmt: skip
    cuts = _arguments.cuts(cu_seqlens, n)
    mask = _arguments.mask(key_mask, k)
    full, groups = _check.fit(
        tuple(q.shape), tuple(k.shape), tuple(v.shape),
        sequences=None if cuts is None else cuts.shape[0] - 1, enable_gqa=enable_gqa, state=shape,
    )  # fmt: skip
    kind = q.dtype
    if found.project is not None and _fusable(q, k, v, mask, state):
        whole = native.fused(found, k)
        told = whole and native.attend(
            q, k, v, whole, number, causal, mask, cuts, enable_gqa, normalize,
            None if state is None else (state.kv, state.k_sum, state.log_scale), return_state,
            "linear" if linear else order, None,
        )  # fmt: skip
        if told is not None:
            answer, *rest = told if return_state else (told,)
            if out is not None:
                answer = into(out, answer, full)
            if not return_state:
                return answer
            return answer, TensorState(rest[0], rest[1], rest[2], found, kind)
    sums = None if state is None else Sums(state.kv, state.k_sum, state.log_scale)
    if _closed.serves(found, q, k, v, *(() if sums is None else sums[:2])):
        D = found.width(k.shape[-1])
        assert D is not None
        if state is not None:
            _check.width((n, D), state.D)
        if not torch.compiler.is_compiling():  # the operator chooses where it runs
            order = closed_order(
                n, k.shape[-2], k.shape[-1], v.shape[-1], D, found.row_operations(k.shape[-1]),
                groups, causal, state is not None or return_state, order,
            )  # fmt: skip
        options = _closed.Options(found, number, causal, enable_gqa, normalize, return_state, order)
        made: tuple[Tensor, Sums | None] = _closed.attend(q, k, v, options, mask, cuts, sums)
        answer, after = made
    else:
        answer, after = expanded(
            found, q, k, v, number, causal, mask, cuts, enable_gqa, normalize, sums,
            return_state, "linear" if linear else order,
        )  # fmt: skip
    if answer.dtype != kind:
        answer = answer.to(kind)
    if out is not None:
        answer = into(out, answer, full)
    if not return_state:
        return answer
    assert after is not None
    return answer, TensorState(*after, found, kind)


def _fusable(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, state: Any) -> bool:
    """Whether the core may make a map's projection too: nothing looks on, no gradient is wanted."""
    grad = torch.is_grad_enabled()
    return (
        _calm()
        and all(_plain(x, grad) for x in (q, k, v))
        and (mask is None or _plain(mask, grad))
        and (state is None or state._plain(grad))
    )


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    causal: bool,
    key_mask: Tensor | None,
    enable_gqa: bool,
    out: Tensor | None,
) -> Tensor:
    """`linattn.softmax_attention`, through `scaled_dot_product_attention`."""
    number = _check.scale(scale)
    causal = _check.flag("causal", causal)
    enable_gqa = _check.flag("enable_gqa", enable_gqa)
    q, k, v = _arguments.rows(q=q, k=k, v=v)
    _check.lengths(
        tuple(q.shape), tuple(k.shape), tuple(v.shape), causal=causal, cut=False,
        remedy="leave causal=False for cross attention",
    )  # fmt: skip
    mask = _arguments.mask(key_mask, k)
    full, groups = _check.fit(
        tuple(q.shape), tuple(k.shape), tuple(v.shape),
        sequences=None, enable_gqa=enable_gqa, state=None,
    )  # fmt: skip
    if mask is not None:  # NaN in a masked row plays no part
        k, v = (torch.where(mask[..., None], x, 0) for x in (k, v))
    if groups != 1:
        k, v = (x.repeat_interleave(groups, -3) for x in (k, v))
        if mask is not None and mask.ndim > 1:
            mask = mask.repeat_interleave(groups, -2) if mask.shape[-2] != 1 else mask
    lead = full[:-2]
    q, k, v = (x.expand(*lead, *x.shape[-2:]) for x in (q, k, v))
    if k.shape[-2] == 0:
        answer = q.new_zeros(full)
    elif mask is None:
        answer = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=number)
    else:
        answer = _masked_softmax(q, k, v, mask, causal, number)
    return answer if out is None else into(out, answer, full)


def _masked_softmax(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, causal: bool, scale: float | None
) -> Tensor:
    """In blocks of queries, so that no n_q x n_k mask exists; rows that see no key give 0."""
    blocks = []
    n = k.shape[-2]
    at = torch.arange(n, device=k.device)
    for a in range(0, max(q.shape[-2], 1), 256):
        rows = q[..., a : a + 256, :]
        seen = mask[..., None, :]
        if causal:
            seen = seen & (at <= at[a : a + 256, None])
        seen = seen.expand(*seen.shape[:-2], rows.shape[-2], n)
        block = F.scaled_dot_product_attention(rows, k, v, attn_mask=seen, scale=scale)
        blocks.append(torch.where(seen.any(-1)[..., None], block, 0))
    return torch.cat(blocks, -2)
