"""`linear_attention` and `softmax_attention` of tensors: checks, and the choice of a road.

Three roads lead to the same numbers:

- direct: nothing differentiates, traces or intercepts, and the tensors lie in this machine's
  memory; the compiled core is called without torch's dispatcher
- operator: `torch.ops.linattn.attend`, which torch differentiates, compiles and exports
- composite: torch operations, for the transforms of torch.func and forward-mode derivatives
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from .. import _check, feature_maps
from ..backends import native
from ..feature_maps import FeatureMap
from . import _arguments, _composite, _direct, _ops
from ._composite import Sums

__all__ = ["attend", "into", "linear_attention", "mapped", "softmax_attention"]

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
    from ._state import TensorState

    # Straight to the compiled core, which takes a call only if everything fits.
    if _calm():
        try:
            found = _FUSED.get(feature_map)
            grad = torch.is_grad_enabled()
            if (
                found is not None
                and _plain(q, grad)
                and _plain(k, grad)
                and _plain(v, grad)
                and (key_mask is None or _plain(key_mask, grad))
                and (eps is None or (type(eps) is float and 0.0 <= eps < _INFINITY))
                and (order != "quadratic" or not (causal or return_state or state is not None))
                and (
                    state is None
                    or (
                        type(state) is TensorState
                        and state.feature_map is found
                        and state.dtype is q.dtype
                        and state._plain(grad)
                    )
                )
                and (out is None or (_plain(out, grad) and not out.requires_grad))
            ):
                result = native.attend(
                    q, k, v, found.kernel, found.eps if eps is None else eps, causal, key_mask,
                    cu_seqlens, enable_gqa, normalize,
                    None if state is None else (state.kv, state.k_sum, state.log_scale),
                    return_state, order, out,
                )  # fmt: skip
                if result is not None:
                    if return_state:
                        return result[0], TensorState(*result[1:], found, q.dtype)
                    return result
        except TypeError:  # an unhashable callable, or a flag that is no bool
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
    full, _ = _check.fit(
        tuple(q.shape), tuple(k.shape), tuple(v.shape),
        sequences=None if cuts is None else cuts.shape[0] - 1, enable_gqa=enable_gqa, state=shape,
    )  # fmt: skip
    kind = q.dtype
    k, v = mapped(found, "k", k, v, None if state is None else state.D)
    q, v = mapped(found, "q", q, v, k.shape[-1])
    if found.project is not None:  # a map may round less, or more, than what it is given
        wide = _arguments.promoted(_arguments.promoted(q.dtype, k.dtype), v.dtype)
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
    if linear:
        order = "linear"
    sums = None if state is None else Sums(state.kv, state.k_sum, state.log_scale)
    answer, after = attend(
        q, k, v, found.kernel, number, causal, mask, cuts, enable_gqa, normalize, sums,
        return_state, order,
    )  # fmt: skip
    if answer.dtype != kind:
        answer = answer.to(kind)
    if out is not None:
        answer = into(out, answer, full)
    if not return_state:
        return answer
    assert after is not None
    return answer, TensorState(*after, found, kind)


def attend(
    q: Tensor, k: Tensor, v: Tensor, kernel: str, eps: float, causal: bool, mask: Tensor | None,
    cuts: Tensor | None, enable_gqa: bool, normalize: bool, sums: Sums | None,
    return_state: bool, order: str,
) -> tuple[Tensor, Sums | None]:  # fmt: skip
    """The operator, or the composite where torch can't differentiate an operator."""
    if transformed():
        return _composite.attend(
            q, k, v, kernel, eps, causal, mask, cuts, enable_gqa, normalize, sums, return_state
        )
    keep = return_state or _worth_keeping(q, k, v, sums, order)
    kv, k_sum, log_scale = sums or (None, None, None)
    out, *after = _ops.attend(
        q, k, v, kernel, eps, causal, mask, cuts, enable_gqa, normalize, kv, k_sum, log_scale,
        keep, order,
    )  # fmt: skip
    if not return_state:
        return out, None
    return out, Sums(after[0], after[1], after[2] if kernel == "exp" else None)


def transformed() -> bool:
    """Whether a transform of torch.func or a forward-mode derivative is in force."""
    return torch._C._are_functorch_transforms_active() or (
        forward_ad._current_level >= 0
    )


def _worth_keeping(q: Tensor, k: Tensor, v: Tensor, sums: Sums | None, order: str) -> bool:
    """Whether the gradient gets the state after all keys, or sums them up once more.

    It is kept where it is small beside the inputs, that memory beyond these stays some per cent.
    """
    if order == "quadratic" or not torch.is_grad_enabled():
        return False
    if torch.compiler.is_compiling():  # sizes may be symbols, and a choice would bind them
        return False
    given = (q, k, v, *(() if sums is None else sums[:2]))
    if not any(x.requires_grad for x in given):
        return False
    size = 8 * k.shape[-1] * (v.shape[-1] + 1)
    for d in torch.broadcast_shapes(k.shape[:-2], v.shape[:-2]):
        size *= d
    inputs = sum(x.numel() for x in (q, k, v)) * q.element_size()
    return 20 * size <= inputs


def mapped(
    found: FeatureMap, name: str, x: Tensor, v: Tensor, D: int | None
) -> tuple[Tensor, Tensor]:
    """What of the map is no kernel, applied."""
    if found.project is None:
        if D is not None:
            _check.width(tuple(x.shape), D)
        return x, v
    made = found.project(x)
    if not isinstance(made, Tensor):
        raise _check.unfit(f"feature_map({name})", made, "a torch.Tensor back", None)
    _arguments.dtype(f"feature_map({name})", made.dtype)
    _check.rows(f"feature_map({name})", tuple(made.shape))
    _check.feature_shape(name, tuple(made.shape), tuple(x.shape), D)
    return made, v


def into(out: Any, answer: Tensor, full: tuple[int, ...]) -> Tensor:
    if not isinstance(out, Tensor):
        raise _check.unfit("out", out, "a torch.Tensor", None)
    if torch.is_grad_enabled() and (answer.requires_grad or out.requires_grad):
        raise _check.no_out_with_gradient()
    _check.out_matches(
        (tuple(out.shape), out.dtype, out.device), (full, answer.dtype, answer.device), "torch"
    )
    return out.copy_(answer)


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
