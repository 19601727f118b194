"""Linear attention as it is defined, in float64 and written for reading.

::

                sum_j  phi(q_i) . phi(k_j)  v_j
    out_i  =  -----------------------------------          j over the keys that row i sees
                sum_j  phi(q_i) . phi(k_j)  + eps

The formula stands here twice: `double_sum` adds up scores, as above; `recurrence` walks the tokens
and keeps S = sum phi(k_j)^T v_j and Z = sum phi(k_j). Both are slow on purpose. They are what the
fast paths are tested against, together with `error_bound`, the size that rounding errors may have.

Three habits make the numbers trustworthy:

- Inputs of any precision are converted to float64, which changes none of them.
- A feature is kept as ``f * 2**n`` with an integer n, so that ``exp`` of +-1000 neither overflows
  nor vanishes; powers of two cancel exactly. All other maps have n = 0.
- Masked and future keys are left out of the sums rather than multiplied by zero, and sums over
  many keys continue in long double where the machine has it, so that errors do not grow with n.

This module imports NumPy and nothing of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["EMPTY", "MAPS", "default_eps", "double_sum", "error_bound", "recurrence"]

Array = NDArray[Any]
Map = str | Callable[[Any], Any] | None

EMPTY = -(2**30)
"""The log-scale of a feature to which no key has contributed."""

BLOCK = 1024  # rows and keys that meet in one matrix product

_LOG2_E = 1.4426950408889634
# ln 2 in two parts; the first has 32 trailing zero bits, so that n times it is exact.
_LN2_HIGH = float.fromhex("0x1.62e42feep-1")
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")


# ---------------------------------------------------------------------------------- feature maps


def _elu1(x: Array) -> Array:
    """x + 1 for x >= 0, exp(x) below."""
    return np.where(x < 0, np.exp(np.minimum(x, 0.0)), x + 1.0)


def _relu(x: Array) -> Array:
    """max(x, 0)."""
    return np.maximum(x, 0.0)


def _squared_relu(x: Array) -> Array:
    """max(x, 0)^2."""
    return np.maximum(x, 0.0) ** 2


def _exp(x: Array) -> Array:
    """exp(x), here only for those who ask; the sums below use `_exp_parts`."""
    return np.exp(x)


def _softplus(x: Array) -> Array:
    """log(1 + exp(x))."""
    return np.logaddexp(0.0, x)


def _sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow on either side."""
    small = np.exp(-np.abs(x))
    return np.where(x < 0, small, 1.0) / (1.0 + small)


def _identity(x: Array) -> Array:
    """x."""
    return x


MAPS: dict[str, Callable[[Array], Array]] = {
    "elu1": _elu1,
    "relu": _relu,
    "squared_relu": _squared_relu,
    "exp": _exp,
    "softplus": _softplus,
    "sigmoid": _sigmoid,
    "identity": _identity,
}
"""The maps by name, defined in float64."""

# |phi'(x)|
_SLOPE: dict[str, Callable[[Array], Array]] = {
    "elu1": lambda x: np.exp(np.minimum(x, 0.0)),
    "relu": lambda x: np.where(x > 0, 1.0, 0.0),
    "squared_relu": lambda x: 2.0 * np.maximum(x, 0.0),
    "softplus": _sigmoid,
    "sigmoid": lambda x: _sigmoid(x) * _sigmoid(-x),
    "identity": np.ones_like,
}


class _Features(NamedTuple):
    """The numbers ``f * 2**n``."""

    f: Array  # float64
    n: Array  # int64, same shape

    def at(self, index: Any) -> _Features:
        return _Features(self.f[index], self.n[index])


def _scale(x: Array, n: Array) -> Array:
    """``x * 2**n``, exactly unless it leaves the range of x."""
    if not n.any():
        return x
    return np.asarray(np.ldexp(x, np.clip(n, -40_000, 40_000).astype(np.int32)))


def _exp_parts(x: Array) -> _Features:
    """exp(x) = f * 2**n with f near 1: x = n ln 2 + r, f = exp(r)."""
    finite = np.isfinite(x)
    n = np.clip(np.rint(np.where(finite, x, 0.0) * _LOG2_E), -(2.0**28), 2.0**28)
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    return _Features(np.exp(r), n.astype(np.int64))


def _steps(feature_map: Map, side: str = "k") -> tuple[Callable[[Array], Any] | None, str]:
    """phi as a map of rows, or None, and then one of `MAPS` for each number.

    An object with `kernel` and `project` says so itself; any other callable is all rows.
    """
    name = "elu1" if feature_map is None else feature_map
    if isinstance(name, str):
        if name not in MAPS:
            raise ValueError(f"feature_map: expected one of {', '.join(MAPS)}, got {name!r}")
        return None, name
    if getattr(name, "kernel", None) in (*MAPS, "signed_exp"):
        queries = getattr(name, "project_queries", None) if side == "q" else None
        rows = queries or getattr(name, "project", None)
        return rows, name.kernel  # type: ignore[attr-defined]
    return name, "identity"


def _exponential(feature_map: Map) -> bool:
    """Whether a state needs a log-scale."""
    return _steps(feature_map)[1] in ("exp", "signed_exp")


def _features(x: Array, feature_map: Map, side: str = "k") -> _Features:
    """phi(x), row by row: (..., n, d_k) -> (..., n, D)."""
    rows, kernel = _steps(feature_map, side)
    if rows is not None:
        x = _exact(rows(x))
    if kernel == "exp":
        return _exp_parts(x)
    if kernel == "signed_exp":  # the sign is the last bit of the exponent
        size = _exp_parts(x)
        odd = np.ascontiguousarray(x).view(np.int64) & 1
        return _Features(np.where(odd == 1, -size.f, size.f), size.n)
    return _Features(MAPS[kernel](x), np.zeros(x.shape, np.int64))


def _sway(x: Array, feature_map: Map, side: str = "k") -> Array:
    """sum_e |x_e d phi / d x_e|, scaled as `_features` are: (..., n, d_k) -> (..., n, D)."""
    rows, kernel = _steps(feature_map, side)
    moved = np.abs(x)
    if rows is not None:
        # It may mix the numbers of a row: move one at a time, by differences.
        h = 2.0**-20
        y = _exact(rows(x))
        moved = np.zeros(y.shape) if kernel == "identity" else np.abs(y)  # y is rounded as well
        for e in range(x.shape[-1]):
            step = np.where(np.arange(x.shape[-1]) == e, h, 0.0)
            ahead, behind = _exact(rows(x * (1.0 + step))), _exact(rows(x * (1.0 - step)))
            moved = moved + np.abs(ahead - behind) / (2.0 * h)
        x = y
    slope = _exp_parts(x).f if kernel in ("exp", "signed_exp") else _SLOPE[kernel](x)
    return np.asarray(moved * slope)


def default_eps(feature_map: Map) -> float:
    """What ``eps=None`` means: 1e-6, and 0 for exponential maps, unless the map has its own.

    Examples
    --------
    >>> default_eps("relu"), default_eps("exp")
    (1e-06, 0.0)
    """
    own = getattr(feature_map, "eps", None)
    if own is not None:
        return float(own)
    return 0.0 if _exponential(feature_map) else 1e-6


# ---------------------------------------------------------------------- one head of one sequence


class _Sums(NamedTuple):
    """S = kv 2^log_scale and Z = k_sum 2^log_scale of one head."""

    kv: Array  # (D, d_v)
    k_sum: Array  # (D,)
    log_scale: Array  # (D,) integers


class _Ratio(NamedTuple):
    """Numerators and denominators of rows, each divided by ``2**top``."""

    numerator: Array  # (n_q, d_v)
    denominator: Array  # (n_q,)
    top: Array  # (n_q,) integers


def _start(D: int, d_v: int, exponential: bool) -> _Sums:
    """The sums over no keys."""
    empty = np.full(D, EMPTY if exponential else 0, np.int64)
    return _Sums(np.zeros((D, d_v)), np.zeros(D), empty)


def _head_by_double_sum(
    q: _Features, k: _Features, v: Array, position: Array, causal: bool, before: _Sums
) -> _Ratio:
    """The sums over j for every row i, a block of rows against a block of keys at a time.

    q: (n_q, D), k: (n_k, D), v: (n_k, d_v); position: (n_k,), rising, says where each key stands:
    row i sees it if not causal or position <= i. `before` holds the sums over earlier keys.
    """
    n_q, n_k = len(q.f), len(k.f)
    rows = np.arange(n_q)
    sees = np.searchsorted(position, rows, "right") if causal else np.full(n_q, n_k)

    # Row i is divided by 2**top[i], the largest power among its terms, whatever the future holds.
    powers = np.concatenate([before.log_scale[None], k.n])
    largest = np.maximum.accumulate(powers, axis=0)[sees] if causal else powers.max(axis=0)
    top = (q.n + largest).max(axis=-1)

    w = _scale(q.f, q.n + before.log_scale - top[:, None])
    numerator = (w @ before.kv).astype(np.longdouble)
    denominator = (w @ before.k_sum).astype(np.longdouble)

    def add(i: slice, j: slice, seen: Array | None = None) -> None:
        """Add the keys j to the rows i: all of them, or where seen: (rows, keys) is True."""
        power = k.n[j].max(axis=0)
        left = _scale(q.f[i], q.n[i] + power - top[i, None])
        right = _scale(k.f[j], k.n[j] - power)
        scores = left @ right.T
        if seen is not None:
            scores = np.where(seen, scores, 0.0)
        numerator[i] += scores @ v[j]
        denominator[i] += scores.sum(axis=-1)

    for first in range(0, n_q, BLOCK):
        last = min(first + BLOCK, n_q)
        i = slice(first, last)
        for begin in range(0, n_k, BLOCK):
            end = min(begin + BLOCK, n_k)
            j = slice(begin, end)
            if sees[first] >= end:
                add(i, j)
            elif sees[last - 1] > begin:  # on the diagonal
                if _moderate(k.at(j), v[j]):
                    add(i, j, np.arange(begin, end) < sees[i, None])
                    continue
                for row in range(first, last):
                    if sees[row] > begin:
                        add(slice(row, row + 1), slice(begin, min(end, int(sees[row]))))
    return _Ratio(numerator, denominator, top)


def _moderate(k: _Features, v: Array) -> bool:
    """Whether a zero score is as good as none: no NaN, no infinity, powers that share one scale."""
    alike = int(k.n.max(initial=0)) - int(k.n.min(initial=0)) <= 256
    return alike and bool(np.isfinite(k.f).all() and np.isfinite(v).all())


def _head_by_recurrence(
    q: _Features, k: _Features, v: Array, position: Array, causal: bool, before: _Sums
) -> _Ratio:
    """S_t = S_{t-1} + phi(k_t)^T v_t and Z_t = Z_{t-1} + phi(k_t), one token after the other."""
    n_q, n_k, d_v = len(q.f), len(k.f), v.shape[-1]
    S, Z = before.kv.astype(np.longdouble), before.k_sum.astype(np.longdouble)
    power = before.log_scale
    ratio = _Ratio(np.zeros((n_q, d_v), S.dtype), np.zeros(n_q, S.dtype), np.zeros(n_q, np.int64))

    j = 0
    for i in range(n_q):
        while j < n_k and (position[j] <= i or not causal):
            higher = np.maximum(power, k.n[j])
            phi = _scale(k.f[j], k.n[j] - higher)
            S = _scale(S, (power - higher)[:, None]) + np.outer(phi, v[j])
            Z = _scale(Z, power - higher) + phi
            power = higher
            j += 1
        top = (q.n[i] + power).max()
        phi = _scale(q.f[i], q.n[i] + power - top)
        ratio.numerator[i], ratio.denominator[i], ratio.top[i] = phi @ S, phi @ Z, top
    return ratio


def _sum_keys(k: _Features, v: Array, before: _Sums) -> _Sums:
    """The sums over all keys: S = phi(K)^T V, Z = phi(K)^T 1, added to those before."""
    power = np.concatenate([before.log_scale[None], k.n]).max(axis=0)
    kv = _scale(before.kv.astype(np.longdouble), (before.log_scale - power)[:, None])
    k_sum = _scale(before.k_sum.astype(np.longdouble), before.log_scale - power)
    for begin in range(0, len(k.f), BLOCK):
        j = slice(begin, begin + BLOCK)
        phi = _scale(k.f[j], k.n[j] - power)
        kv = kv + phi.T @ v[j]
        k_sum = k_sum + phi.sum(axis=0)
    return _Sums(kv.astype(np.float64), k_sum.astype(np.float64), power)


# ------------------------------------------------------------------- many heads, many sequences

_Head = Callable[[_Features, _Features, Array, Array, bool, _Sums], _Ratio]


def _exact(x: ArrayLike) -> Array:
    """x in float64, which holds every float16, bfloat16, float32 and float64 number."""
    return np.asarray(x).astype(np.float64)


class _Problem:
    """The arguments of one call, made plain: every head of every sequence on its own.

    Batch axes broadcast as in ``numpy.matmul``. With grouped heads, key head h serves the query
    heads h G ... h G + G - 1.
    """

    def __init__(
        self,
        q: _Features,
        k: _Features,
        v: Array,
        causal: bool,
        key_mask: ArrayLike | None,
        cu_seqlens: ArrayLike | None,
        enable_gqa: bool,
        state: tuple[Any, ...] | None,
        exponential: bool,
    ) -> None:
        self.v, self.causal, self.exponential = v, causal, exponential
        self.q, self.k = q, k
        self.n_q, self.n_k = q.f.shape[-2], k.f.shape[-2]
        self.D, self.d_v = k.f.shape[-1], v.shape[-1]
        if causal and self.n_q != self.n_k:
            raise ValueError(f"causal: expected n_q == n_k, got {self.n_q} and {self.n_k}")

        self.cuts: list[tuple[slice, slice]] = [(slice(0, self.n_q), slice(0, self.n_k))]
        if cu_seqlens is not None:
            ends = [int(end) for end in np.asarray(cu_seqlens)]
            self.cuts = [(slice(a, b), slice(a, b)) for a, b in pairwise(ends)]
        self.packed = cu_seqlens is not None

        self.state: _Sums | None = None
        shapes = [k.f.shape[:-2], v.shape[:-2]]
        if state is not None:
            kv, k_sum = _exact(state[0]), _exact(state[1])
            log_scale = np.zeros(k_sum.shape, np.int64)
            if len(state) > 2 and state[2] is not None:
                log_scale = np.asarray(state[2]).astype(np.int64)
            if not self.packed:
                kv, k_sum, log_scale = kv[None], k_sum[None], log_scale[None]
            self.state = _Sums(kv, k_sum, log_scale)
            shapes.append(kv.shape[1:-2])
        self.key_batch = np.broadcast_shapes(*shapes)

        seen = np.ones(self.n_k, bool)
        if key_mask is not None:
            seen = np.asarray(key_mask).astype(bool)
            if seen.ndim not in (1, k.f.ndim - 1):
                raise ValueError(f"key_mask: expected {k.f.ndim - 1} axes, or 1, got {seen.ndim}")
        self.seen = np.broadcast_to(seen, (*self.key_batch, self.n_k))

        self.groups = 1
        batch = self.key_batch
        if enable_gqa:
            self.groups = q.f.shape[-3] // batch[-1]
            batch = (*batch[:-1], batch[-1] * self.groups)
        self.batch = np.broadcast_shapes(q.f.shape[:-2], batch)
        self.spread = batch

    def key_index(self, index: tuple[int, ...]) -> tuple[int, ...]:
        """The key head that serves the query head with this index."""
        index = index[len(index) - len(self.spread) :]
        index = tuple(0 if size == 1 else i for i, size in zip(index, self.spread, strict=True))
        return (*index[:-1], index[-1] // self.groups) if self.groups > 1 else index

    def before(self, sequence: int, key: tuple[int, ...]) -> _Sums:
        """The sums over the keys before this call."""
        if self.state is None:
            return _start(self.D, self.d_v, self.exponential)
        kv, k_sum, log_scale = (part[sequence] for part in self.state)
        return _Sums(
            np.broadcast_to(kv, (*self.key_batch, self.D, self.d_v))[key],
            np.broadcast_to(k_sum, (*self.key_batch, self.D))[key],
            np.broadcast_to(log_scale, (*self.key_batch, self.D))[key],
        )

    def keys(self, cut: slice, key: tuple[int, ...]) -> tuple[_Features, Array, Array]:
        """The keys of a head that take part, their values, and where they stand."""
        position = np.flatnonzero(self.seen[key][cut])
        f, n = (np.broadcast_to(x, (*self.key_batch, *x.shape[-2:]))[key][cut] for x in self.k)
        v = np.broadcast_to(self.v, (*self.key_batch, *self.v.shape[-2:]))[key][cut]
        return _Features(f[position], n[position]), v[position], position

    def ratio(self, head: _Head) -> _Ratio:
        """Numerators and denominators of every row of every head."""
        rows = (*self.batch, self.n_q)
        numerator = np.zeros((*rows, self.d_v), np.longdouble)
        denominator, top = np.zeros(rows, np.longdouble), np.zeros(rows, np.int64)
        f, n = (np.broadcast_to(x, (*self.batch, *x.shape[-2:])) for x in self.q)
        for sequence, (cut_q, cut_k) in enumerate(self.cuts):
            for index in np.ndindex(*self.batch):
                key = self.key_index(index)
                q = _Features(f[index][cut_q], n[index][cut_q])
                k, v, position = self.keys(cut_k, key)
                part = head(q, k, v, position, self.causal, self.before(sequence, key))
                numerator[index][cut_q], denominator[index][cut_q], top[index][cut_q] = part
        return _Ratio(numerator, denominator, top)

    def final(self) -> tuple[Array, Array, Array | None]:
        """The state after this call: (kv, k_sum, log_scale), one a sequence where packed."""
        shape = (len(self.cuts), *self.key_batch, self.D)
        kv, k_sum = np.zeros((*shape, self.d_v)), np.zeros(shape)
        log_scale = np.zeros(shape, np.int32)
        for sequence, (_, cut) in enumerate(self.cuts):
            for key in np.ndindex(*self.key_batch):
                k, v, _ = self.keys(cut, key)
                sums = _sum_keys(k, v, self.before(sequence, key))
                at = (sequence, *key)
                kv[at], k_sum[at], log_scale[at] = sums
        if not self.packed:
            kv, k_sum, log_scale = kv[0], k_sum[0], log_scale[0]
        return kv, k_sum, log_scale if self.exponential else None


def _divide(ratio: _Ratio, eps: float, normalize: bool) -> Array:
    """numerator / (denominator + eps), 0 where that is 0; or the numerator alone."""
    numerator, denominator, top = ratio
    if not normalize:
        return _scale(numerator, top[..., None]).astype(np.float64)
    denominator = denominator + _scale(np.full(top.shape, eps, np.longdouble), -top)
    zero = (denominator == 0)[..., None]
    out = np.where(zero, 0.0, numerator / np.where(zero, 1.0, denominator[..., None]))
    return out.astype(np.float64)


def _attention(
    head: _Head,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    feature_map: Map,
    eps: float | None,
    causal: bool,
    key_mask: ArrayLike | None,
    cu_seqlens: ArrayLike | None,
    enable_gqa: bool,
    normalize: bool,
    state: tuple[Any, ...] | None,
    return_state: bool,
) -> Any:
    with np.errstate(all="ignore"):
        problem = _Problem(
            _features(_exact(q), feature_map, "q"),
            _features(_exact(k), feature_map),
            _exact(v),
            causal,
            key_mask,
            cu_seqlens,
            enable_gqa,
            state,
            _exponential(feature_map),
        )
        eps = default_eps(feature_map) if eps is None else float(eps)
        out = _divide(problem.ratio(head), eps, normalize)
        return (out, problem.final()) if return_state else out


# ------------------------------------------------------------------------------- the public face


def double_sum(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    feature_map: Map = None,
    eps: float | None = None,
    *,
    causal: bool = False,
    key_mask: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None,
    enable_gqa: bool = False,
    normalize: bool = True,
    state: tuple[Any, ...] | None = None,
    return_state: bool = False,
) -> Any:
    """Linear attention by its definition: scores first, then their weighted mean.

    ::

        out_i = sum_j s_ij v_j / (sum_j s_ij + eps)      s_ij = phi(q_i) . phi(k_j)

    q: (..., n_q, d_k), k: (..., n_k, d_k), v: (..., n_k, d_v) -> (..., n_q, d_v), in float64;
    j runs over the keys that are not masked and, where causal, stand at i or before.

    Parameters
    ----------
    q, k, v
        arrays of any floating-point type, bfloat16 included; batch axes broadcast
    feature_map
        phi: None (elu1), a name in `MAPS`, or a callable that acts row by row on float64 arrays
    eps
        added to the denominator; None means `default_eps`
    causal
        row i sees the keys 0 ... i
    key_mask
        True where a key takes part: (n_k,), or k's shape less its last axis
    cu_seqlens
        [0, ..., n]: the sequences between these positions do not see each other
    enable_gqa
        k and v have fewer heads (third axis from the end), each for a consecutive group of q's
    normalize
        False leaves the numerator
    state
        sums over earlier keys, ``(kv, k_sum)`` or ``(kv, k_sum, log_scale)``, meaning
        S = kv 2^log_scale: (..., D, d_v) and Z = k_sum 2^log_scale: (..., D); with `cu_seqlens`
        one for each sequence, along a leading axis
    return_state
        also return ``(kv, k_sum, log_scale)`` after this call; log_scale is None unless the map
        is exponential, and the scale is not unique: compare S and Z

    Returns
    -------
    out, or (out, (kv, k_sum, log_scale)) with `return_state`

    Examples
    --------
    Two keys with the weights 1 and 3:

    >>> double_sum([[1.0]], [[1.0], [3.0]], [[10.0], [20.0]], "identity", eps=0.0)
    array([[17.5]])
    >>> double_sum([[0.0]], [[1000.0], [999.0]], [[1.0], [0.0]], "exp")  # 1 / (1 + 1/e)
    array([[0.73105858]])
    """
    return _attention(
        _head_by_double_sum,
        q,
        k,
        v,
        feature_map,
        eps,
        causal,
        key_mask,
        cu_seqlens,
        enable_gqa,
        normalize,
        state,
        return_state,
    )


def recurrence(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    feature_map: Map = None,
    eps: float | None = None,
    *,
    causal: bool = False,
    key_mask: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None,
    enable_gqa: bool = False,
    normalize: bool = True,
    state: tuple[Any, ...] | None = None,
    return_state: bool = False,
) -> Any:
    """Linear attention token by token: the same numbers as `double_sum`, found by walking.

    ::

        S_t = S_{t-1} + phi(k_t)^T v_t        Z_t = Z_{t-1} + phi(k_t)
        out_t = phi(q_t) S_t / (phi(q_t) . Z_t + eps)

    Arguments and result are those of `double_sum`. Where not causal, all keys are absorbed before
    the first row is queried.

    Examples
    --------
    >>> q = k = [[1.0], [2.0]]
    >>> recurrence(q, k, [[10.0], [20.0]], "identity", eps=0.0, causal=True)
    array([[10.        ],
           [16.66666667]])
    """
    return _attention(
        _head_by_recurrence,
        q,
        k,
        v,
        feature_map,
        eps,
        causal,
        key_mask,
        cu_seqlens,
        enable_gqa,
        normalize,
        state,
        return_state,
    )


def error_bound(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    feature_map: Map = None,
    eps: float | None = None,
    *,
    causal: bool = False,
    key_mask: ArrayLike | None = None,
    cu_seqlens: ArrayLike | None = None,
    enable_gqa: bool = False,
    normalize: bool = True,
    state: tuple[Any, ...] | None = None,
) -> Array:
    """How large a rounding error may be, in units of the machine epsilon; shaped as the output.

    ::

        (sum_j s_ij |v_j|  +  |out_i| sum_j s_ij) / |sum_j phi(q_i) . phi(k_j) + eps|

        s_ij = sum_d |phi_d(q_i)| |phi_d(k_j)| (2 + c_d(q_i) + c_d(k_j))
        c_d(x) = sum_e |x_e / phi_d(x)  d phi_d / d x_e|

    The first term stands for the errors of the numerator, the second for those of the denominator.
    Each product carries a rounding of phi(q) and of phi(k), and what phi makes of a rounding of its
    argument, its conditioning c: |x| for exp, 1 for the identity. Neither term grows with n where
    the weights are positive, and a right computation in a dtype stays within a small multiple of
    ``finfo(dtype).eps`` times this, however many keys there are, as long as nothing underflows.

    The arguments are those of `double_sum`; a state enters with |kv|, as it doesn't say how much
    has cancelled in it.

    Examples
    --------
    Equal signs: a small multiple of the output, 2. Opposite signs: the same for an output of 0.

    >>> double_sum([[1.0]], [[1.0], [1.0]], [[2.0], [-2.0]], "relu", eps=0.0)
    array([[0.]])
    >>> error_bound([[1.0]], [[1.0], [1.0]], [[2.0], [-2.0]], "relu", eps=0.0)
    array([[8.]])
    """
    with np.errstate(all="ignore"):
        q, k, v = _exact(q), _exact(k), _exact(v)
        phi_q, phi_k = _features(q, feature_map, "q"), _features(k, feature_map)
        eps = default_eps(feature_map) if eps is None else float(eps)
        exponential = _exponential(feature_map)
        common = (causal, key_mask, cu_seqlens, enable_gqa)
        ratio = _Problem(phi_q, phi_k, v, *common, state, exponential).ratio(_head_by_double_sum)

        # One sum of 2 D features gives both parts of s: (phi + sway)(q) phi(k) + phi(q) (...)(k).
        def pair(phi: _Features, x: Array, swaying_first: bool) -> _Features:
            still = np.abs(phi.f)
            both = [still + _sway(x, feature_map, "q" if swaying_first else "k"), still]
            parts = both if swaying_first else both[::-1]
            return _Features(np.concatenate(parts, -1), np.concatenate([phi.n, phi.n], -1))

        doubled = None
        if state is not None:
            kv, k_sum = np.abs(_exact(state[0])), np.abs(_exact(state[1]))
            log_scale = state[2] if len(state) > 2 else None
            doubled = (
                np.concatenate([kv, kv], -2),
                np.concatenate([k_sum, k_sum], -1),
                None if log_scale is None else np.concatenate([log_scale, log_scale], -1),
            )
        size = _Problem(
            pair(phi_q, q, True), pair(phi_k, k, False), np.abs(v), *common, doubled, exponential
        ).ratio(_head_by_double_sum)

        if not normalize:
            return _scale(size.numerator, size.top[..., None]).astype(np.float64)
        out = np.abs(_divide(ratio, eps, True))
        error = size.numerator + out * size.denominator[..., None]
        below = ratio.denominator + _scale(np.full(ratio.top.shape, eps, np.longdouble), -ratio.top)
        bound = np.where(error == 0, 0.0, error / np.abs(below)[..., None])
        return np.asarray(bound.astype(np.float64))
