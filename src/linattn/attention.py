"""Linear attention, and softmax attention beside it as the baseline."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy import ndarray

from . import _check, backends, feature_maps
from .backends import native
from .feature_maps import FeatureMap
from .plan import prefers_quadratic
from .state import State

__all__ = ["linear_attention", "softmax_attention"]

Array = Any
Map = str | FeatureMap | Callable[[Any], Any] | None
Order = Literal["auto", "linear", "quadratic"]

# Arguments that name a wholly fused map: one look-up decides whether a call can go straight on.
_FUSED: dict[Any, FeatureMap] = {None: feature_maps.elu1}
for _name in feature_maps.names():
    _FUSED[_name] = _FUSED[feature_maps.get(_name)] = feature_maps.get(_name)


def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    feature_map: Map = None,
    eps: float | None = None,
    *,
    causal: bool = False,
    key_mask: Array | None = None,
    cu_seqlens: Array | None = None,
    enable_gqa: bool = False,
    normalize: bool = True,
    state: State | None = None,
    return_state: bool = False,
    order: Order = "auto",
    out: Array | None = None,
) -> Any:
    try:
        found = _FUSED.get(feature_map)
    except TypeError:  # an unhashable callable
        found = None
    if found is not None and type(q) is ndarray:
        number = found.eps if eps is None else eps
        if (
            type(number) is float
            and 0.0 <= number < math.inf
            and (order != "quadratic" or not (causal or return_state or state is not None))
        ):
            if state is None:
                sums = None
            elif type(state) is State and state.feature_map is found and state.dtype is q.dtype:
                sums = (state.kv, state.k_sum, state.log_scale)
            else:
                return _attention(
                    q, k, v, feature_map, eps, causal, key_mask, cu_seqlens, enable_gqa,
                    normalize, state, return_state, order, out,
                )  # fmt: skip
            result = native.attend(
                q, k, v, found.kernel, number, causal, key_mask, cu_seqlens, enable_gqa,
                normalize, sums, return_state, order, out,
            )  # fmt: skip
            if result is not None:
                if return_state:
                    return result[0], State(result[1], result[2], result[3], found, q.dtype)
                return result
    return _attention(
        q, k, v, feature_map, eps, causal, key_mask, cu_seqlens, enable_gqa,
        normalize, state, return_state, order, out,
    )  # fmt: skip


def _attention(
    q: Array,
    k: Array,
    v: Array,
    feature_map: Map,
    eps: float | None,
    causal: bool,
    key_mask: Array | None,
    cu_seqlens: Array | None,
    enable_gqa: bool,
    normalize: bool,
    state: State | None,
    return_state: bool,
    order: str,
    out: Array | None,
) -> Any:
    """The whole road: check, make alike, map, choose the order, compute."""
    found = feature_maps.get(feature_map)
    number = _check.eps(eps, found.eps)
    causal = _check.flag("causal", causal)
    enable_gqa = _check.flag("enable_gqa", enable_gqa)
    normalize = _check.flag("normalize", normalize)
    return_state = _check.flag("return_state", return_state)
    linear = _check.order(order, causal, state is not None, return_state)
    shape = None
    if state is not None:
        if not isinstance(state, State):
            raise TypeError(f"state: expected a State or None, got {type(state).__name__}")
        _check.same_map(found, state.feature_map, "state")
        shape = state._shape
    call = _check.attention(
        q,
        k,
        v,
        mask=key_mask,
        cuts=cu_seqlens,
        enable_gqa=enable_gqa,
        causal=causal,
        state=shape,
    )
    kind = call.dtype
    if out is not None:
        used = {"q": q, "k": k, "v": v, "key_mask": call.key_mask}
        if state is not None:
            used |= {"state": state.kv, "the state's k_sum": state.k_sum}
        _check.output(out, call.shape, kind, used)
    q, k, v = call.q, call.k, call.v
    if found.project is not None:
        k = _check.features("k", found.project(k), k, None if state is None else state.D)
        q = _check.features("q", found.project(q), q, k.shape[-1])
        wide = _check.promoted(*(_check.dtype("q", x.dtype) for x in (q, k, v)))
        q, k, v = (_check.converted(x, wide) for x in (q, k, v))
    elif state is not None:
        _check.width(k, state.D)
    if not linear and order == "auto":
        cheaper = prefers_quadratic(q.shape[-2], k.shape[-2], k.shape[-1], v.shape[-1], call.groups)
        order = "quadratic" if cheaper else "linear"
    elif linear:
        order = "linear"
    sums = None if state is None else (state.kv, state.k_sum, state.log_scale)
    native.know(q.dtype)
    result = backends.attend(
        q, k, v, found.kernel, number, causal, call.key_mask, call.cu_seqlens, enable_gqa,
        normalize, sums, return_state, order, out if q.dtype == kind else None,
    )  # fmt: skip
    answer = result[0] if return_state else result
    if out is not None:
        if answer is not out:
            with np.errstate(all="ignore"):
                out[...] = answer
        answer = out
    else:
        answer = _check.converted(answer, kind)
    if return_state:
        return answer, State(result[1], result[2], result[3], found, kind)
    return answer


def softmax_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    key_mask: Array | None = None,
    enable_gqa: bool = False,
    out: Array | None = None,
) -> Array:
    scale_ = _check.scale(scale)
    causal = _check.flag("causal", causal)
    enable_gqa = _check.flag("enable_gqa", enable_gqa)
    call = _check.attention(
        q, k, v, mask=key_mask, enable_gqa=enable_gqa, causal=causal,
        remedy="leave causal=False for cross attention",
    )  # fmt: skip
    kind = call.dtype
    if out is not None:
        used = {"q": q, "k": k, "v": v, "key_mask": call.key_mask}
        _check.output(out, call.shape, kind, used)
    else:
        out = np.empty(call.shape, dtype=kind)
    if scale_ is None:
        scale_ = call.q.shape[-1] ** -0.5
    backends.array.softmax(call.q, call.k, call.v, scale_, causal, call.key_mask, call.groups, out)
    return out
