"""Linear attention, and softmax attention beside it as the baseline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, overload

import numpy as np
from numpy import ndarray

from . import _check, backends, feature_maps, fronts
from .backends import closed, native
from .feature_maps import FeatureMap
from .plan import closed_order, prefers_quadratic
from .state import State

__all__ = ["linear_attention", "softmax_attention"]

Array = Any
A = TypeVar("A")
Map = str | FeatureMap | Callable[[Any], Any] | None
Order = Literal["auto", "linear", "quadratic"]

_INFINITY = float("inf")

# Arguments that name a kernel: one look-up decides whether a call can go straight on.
_FUSED: dict[Any, FeatureMap] = {None: feature_maps.elu1}
for _name in feature_maps.names():
    _FUSED[_name] = _FUSED[feature_maps.get(_name)] = feature_maps.get(_name)


@overload
def linear_attention(
    q: A,
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
    return_state: Literal[False] = False,
    order: Order = "auto",
    out: Array | None = None,
) -> A: ...


@overload
def linear_attention(
    q: A,
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
    return_state: Literal[True],
    order: Order = "auto",
    out: Array | None = None,
) -> tuple[A, State]: ...


@overload
def linear_attention(
    q: A,
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
    return_state: bool,
    order: Order = "auto",
    out: Array | None = None,
) -> A | tuple[A, State]: ...


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
    """Attention whose cost grows with the length, not with its square.

    ::

                 sum_j phi(q_i) . phi(k_j)  v_j          phi(q_i) (sum_j phi(k_j)^T v_j)
        out_i = ---------------------------------  =  --------------------------------------
                 sum_j phi(q_i) . phi(k_j) + eps       phi(q_i) . (sum_j phi(k_j)) + eps

    q: (..., n_q, d_k), k: (..., n_k, d_k), v: (..., n_k, d_v) -> out: (..., n_q, d_v);
    phi: R^d_k -> R^D row by row; j runs over all keys, or those at i and before where causal.
    Leading axes (batch, heads) broadcast as in `numpy.matmul`, a state's included.

    Nothing is scaled: divide q and k yourself where a map asks for it.

    Parameters
    ----------
    q, k, v
        float16, bfloat16, float32 or float64; mixed dtypes promote, and sums are float64
    feature_map
        None (`elu1`), a name, a `FeatureMap`, or a callable that acts row by row on the whole q
        and the whole k and may change their number of features
    eps
        >= 0, added to the denominator in its true units; None is the map's default, 1e-6, and 0
        for exponential maps. Where denominator + eps is 0 the output is 0.
    causal
        position i sees the keys at 0 ... i; needs n_q == n_k
    key_mask
        boolean, True where a key takes part: (n_k,), or k's shape less its last axis with ones
        allowed. What stands in a masked row of k or v, NaN included, plays no part.
    cu_seqlens
        integers [0, ..., n] that cut the positions of q and k into sequences of their own; states
        then have one leading axis of sequences
    enable_gqa
        k and v have fewer heads (third axis from the end) than q, each serving a consecutive group
        of query heads; a state has the heads of k
    normalize
        False leaves the numerator alone
    state
        a `State` of earlier keys; it is not changed
    return_state
        return (out, state), where the new state includes the one given
    order
        "auto" takes the cheaper of "linear" and "quadratic", see `plan`; neither ever holds an
        n_q x n_k array. A state, given or returned, and the causal form are linear.
    out
        an array for the result, which shares no memory with an input

    Returns
    -------
    out, or (out, state) with `return_state`

    Raises
    ------
    TypeError
        a dtype that is not floating, a mask that is not boolean
    ValueError
        shapes that do not fit; the message names the axis and the remedy

    Examples
    --------
    Equal keys weigh equally, and eps is small:

    >>> import numpy as np
    >>> q, k, v = np.zeros((2, 4)), np.zeros((3, 4)), np.array([[0.0], [3.0], [6.0]])
    >>> linear_attention(q, k, v).round(5)
    array([[3.],
           [3.]])
    >>> linear_attention(k, k, v, causal=True, eps=0.0)
    array([[0. ],
           [1.5],
           [3. ]])
    >>> linear_attention(q, k, v, key_mask=np.array([True, True, False]), eps=0.0)
    array([[1.5],
           [1.5]])

    The textbook call, a function of one's own included, and a sequence in two parts:

    >>> linear_attention(q, k, v, lambda x: np.exp(x) ** 2, 0.0)
    array([[3.],
           [3.]])
    >>> _, state = linear_attention(k[:2], k[:2], v[:2], causal=True, return_state=True)
    >>> linear_attention(k[2:], k[2:], v[2:], causal=True, eps=0.0, state=state)
    array([[3.]])

    Source: Katharopoulos et al. 2020, "Transformers are RNNs: Fast Autoregressive Transformers
    with Linear Attention", eqs. 4 and 5 (their phi, Q, K, V are ours; eps is not in the paper).
    """
    # Straight to the compiled core, which takes a call only if everything fits. A TypeError is an
    # unhashable callable or a flag that is no bool: the road below sorts it out.
    try:
        # Not a look at the map unless q is an array: torch.compile would hash all its fields.
        found = _FUSED.get(feature_map) if type(q) is ndarray else None
        if found is None and type(q) is type(k) is ndarray:
            if isinstance(feature_map, (str, FeatureMap)):
                found = feature_maps.get(feature_map)
        if (
            found is not None
            and (eps is None or (type(eps) is float and 0.0 <= eps < _INFINITY))
            and (order != "quadratic" or not (causal or return_state or state is not None))
            and (
                state is None
                or (
                    type(state) is State
                    and (state.feature_map is found or state.feature_map == found)
                    and state.dtype is q.dtype
                )
            )
            and (whole := found.kernel if found.project is None else native.fused(found, k))
        ):
            result = native.attend(
                q, k, v, whole, found.eps if eps is None else eps, causal, key_mask,
                cu_seqlens, enable_gqa, normalize,
                None if state is None else (state.kv, state.k_sum, state.log_scale),
                return_state, order, out,
            )  # fmt: skip
            if result is not None:
                if return_state:
                    return result[0], State(result[1], result[2], result[3], found, q.dtype)
                return result
    except TypeError:
        pass
    if type(q) is not ndarray:
        front = fronts.front(q)
        if front is not None:
            return front.linear_attention(
                q, k, v, feature_map, eps, causal, key_mask, cu_seqlens, enable_gqa,
                normalize, state, return_state, order, out,
            )  # fmt: skip
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
        if state.library != "numpy":
            raise _check.unfit_state(state, "numpy arrays", "State.of(k, v) of arrays")
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
    direct = None  # what of out a backend may write into itself
    if out is not None:
        used = {"q": q, "k": k, "v": v, "key_mask": call.key_mask}
        if state is not None:
            used |= {"state": state.kv, "the state's k_sum": state.k_sum}
        direct = _check.output(out, call.shape, kind, used)
    q, k, v = call.q, call.k, call.v
    if found.closed_form:
        result = _closed(found, q, k, v, number, causal, call, enable_gqa, normalize, state,
                         return_state, order, direct)  # fmt: skip
        return _answered(result, found, kind, return_state, out, direct)
    sums = None if state is None else (state.kv, state.k_sum, state.log_scale)
    native.know(q.dtype)
    if found.project is not None:
        whole = native.fused(found, k)
        if whole is not None:  # the core makes the projection too, a block of rows at a time
            result = native.attend(
                q, k, v, whole, number, causal, call.key_mask, call.cu_seqlens, enable_gqa,
                normalize, sums, return_state, order, direct,
            )  # fmt: skip
            if result is not None:
                return _answered(result, found, kind, return_state, out, direct)
        D = None if state is None else state.D
        k = _check.features("k", found.project(k), k, D)
        q = _check.features("q", (found.project_queries or found.project)(q), q, k.shape[-1])
        wide = _check.promoted(*(_check.dtype("q", x.dtype) for x in (q, k, v)))
        q, k, v = (_check.converted(x, wide) for x in (q, k, v))
    elif state is not None:
        _check.width(k.shape, state.D)
    if not linear and order == "auto":
        cheaper = prefers_quadratic(q.shape[-2], k.shape[-2], k.shape[-1], v.shape[-1], call.groups)
        order = "quadratic" if cheaper else "linear"
    elif linear:
        order = "linear"
    native.know(q.dtype)
    result = backends.attend(
        q, k, v, found.kernel, number, causal, call.key_mask, call.cu_seqlens, enable_gqa,
        normalize, sums, return_state, order, direct if q.dtype == kind else None,
    )  # fmt: skip
    return _answered(result, found, kind, return_state, out, direct)


def _closed(
    found: FeatureMap,
    q: Array,
    k: Array,
    v: Array,
    eps: float,
    causal: bool,
    call: _check.Attention,
    enable_gqa: bool,
    normalize: bool,
    state: State | None,
    return_state: bool,
    order: str,
    out: Array | None,
) -> Any:
    """A map with a closed form: its features are made a block at a time, if at all."""
    n, d_k, d_v, D = q.shape[-2], k.shape[-1], v.shape[-1], found.width(k.shape[-1])
    assert D is not None
    sums = None
    if state is not None:
        _check.width((n, D), state.D)
        sums = (state.kv, state.k_sum, state.log_scale)
    order = closed_order(
        n, k.shape[-2], d_k, d_v, D, found.row_operations(d_k), call.groups, causal,
        state is not None or return_state, order,
    )  # fmt: skip
    if out is None:
        out = np.empty(call.shape, dtype=call.dtype)
    return closed.attend(
        q, k, v, found, eps, causal, call.key_mask, call.cu_seqlens, enable_gqa, normalize, sums,
        return_state, order, out,
    )  # fmt: skip


def _answered(
    result: Any, found: FeatureMap, kind: Any, return_state: bool, out: Any, direct: Any
) -> Any:
    """What a backend gave, in the dtype promised and in the array given."""
    answer = result[0] if return_state else result
    if out is not None:
        if answer is not direct:
            with np.errstate(all="ignore"):
                out[...] = answer
        answer = out
    else:
        answer = _check.converted(answer, kind)
    if return_state:
        return answer, State(result[1], result[2], result[3], found, kind)
    return answer


def softmax_attention(
    q: A,
    k: Array,
    v: Array,
    *,
    scale: float | None = None,
    causal: bool = False,
    key_mask: Array | None = None,
    enable_gqa: bool = False,
    out: Array | None = None,
) -> A:
    """Softmax attention, exact, in NumPy: what linear attention is measured against.

    ::

        out = softmax(scale q k^T) v

    q: (..., n_q, d_k), k: (..., n_k, d_k), v: (..., n_k, d_v) -> out: (..., n_q, d_v)

    It works through blocks of queries and keys, so that lengths can be measured at which an
    n_q x n_k array would not fit; products are in float32 (float64 for float64 inputs).

    Parameters
    ----------
    scale
        of the scores; None is 1/sqrt(d_k)
    q, k, v, causal, key_mask, enable_gqa, out
        as in `linear_attention`; a row that sees no key gives 0

    Raises
    ------
    TypeError, ValueError
        as in `linear_attention`

    Examples
    --------
    >>> import numpy as np
    >>> q, k = np.array([[1.0, 0.0]]), np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> softmax_attention(q, k, np.array([[1.0], [0.0]]), scale=1.0).round(4)  # e / (e + 1)
    array([[0.7311]])

    Source: Vaswani et al. 2017, "Attention Is All You Need", eq. 1; blockwise as in Milakov and
    Gimelshein 2018, "Online normalizer calculation for softmax".
    """
    front = fronts.front(q)
    if front is not None:
        return front.softmax_attention(  # type: ignore[no-any-return]
            q, k, v, scale, causal, key_mask, enable_gqa, out
        )
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
    result: Any = np.empty(call.shape, dtype=kind) if out is None else out
    plain = result.view(np.ndarray)  # of a memory map
    if scale_ is None:
        scale_ = call.q.shape[-1] ** -0.5
    backends.array.softmax(
        call.q, call.k, call.v, scale_, causal, call.key_mask, call.groups, plain
    )
    return result  # type: ignore[no-any-return]
