"""Maps with a closed form, kappa(q . k) = phi(q) . phi(k): no n x D array of features ever exists.

::

    quadratic:  kappa(q k^T) v                              n_q n_k (d_k + d_v)
    linear:     phi(q) (phi(k)^T v), a block of rows at a time
    causal:     as linear, chunk by chunk, and kappa(q k^T) v under the diagonal of a chunk; where
                that is cheaper, all positions are one chunk

Scores and products are computed in the precision of the inputs, at least float32, block by block;
what blocks give is added up in float64. A row that leaves float32's range on the way is computed
again in float64, by itself, so that no row's bits depend on another.

The arrays are NumPy's, and the arguments checked ones. All blocks of a call are computed in the
same memory: arrays of their size that NumPy makes and drops go back to the system each time, and
the page faults of the next block took three quarters of a call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..feature_maps import FeatureMap, cast
from .array import _at, _grouped, _indices, _quiet, _zeros

__all__ = ["absorb", "attend"]

Array = Any
Sums = tuple[Any, Any, Any]

ROWS = 256  # queries in a block, and positions in a chunk
KEYS = 512  # keys that meet them


def attend(
    q: Array,
    k: Array,
    v: Array,
    found: FeatureMap,
    eps: float,
    causal: bool,
    key_mask: Array | None,
    cu_seqlens: Array | None,
    enable_gqa: bool,
    normalize: bool,
    state: Sums | None,
    return_state: bool,
    order: str,
    out: Array,
) -> Any:
    """Fills out (..., n_q, d_v); returns it, or (out, kv, k_sum, None) with `return_state`.

    As `array.attend`, but q and k are those before the map, and `order` means the causal form too:
    "quadratic" makes one chunk of all positions, which needs no state.
    """
    groups, held = 1, out.shape[:-2]  # held: the batch shape of keys
    if enable_gqa:
        heads = max(k.shape[-3], v.shape[-3], 1 if state is None else state[0].shape[-3])
        groups = q.shape[-3] // heads
        q, filled = _grouped(q, heads), _grouped(out, heads)
        held = filled.shape[:-3]
    else:
        q, filled = q[..., None, :, :], out[..., None, :, :]
    past = () if state is None else state[0].shape[(1 if cu_seqlens is not None else 0) : -2]
    held_by_state = np.broadcast_shapes(k.shape[:-2], v.shape[:-2], past)
    bounds = [0, q.shape[-2]] if cu_seqlens is None else [int(b) for b in cu_seqlens]
    D, d_v = found.width(k.shape[-1]), v.shape[-1]
    new = None
    if return_state:
        new = _zeros(np, (len(bounds) - 1, *held_by_state), D, d_v, False)  # type: ignore[arg-type]
    linear = order == "linear"
    work = _Work(found, q.dtype)
    with _quiet(np):
        for i in range(len(bounds) - 1):
            rows = slice(bounds[i], bounds[i + 1])
            keys = slice(None) if cu_seqlens is None else rows
            before = state
            if state is not None and cu_seqlens is not None:
                before = _at(state, i)
            for at in _indices(held):
                mask = None if key_mask is None else _pick(key_mask, at, 1)[keys]
                sums = _start(work, before, at, D, d_v) if linear else None
                seen = state is not None
                ks, vs = _pick(k, at, 2)[keys], _pick(v, at, 2)[keys]
                qs = [_pick(q, (*at, g), 2)[rows] for g in range(groups)]
                targets = [filled[(*at, g)][rows] for g in range(groups)]
                if causal:
                    _causal(work, sums, seen, qs, ks, vs, mask, eps, normalize, targets,
                            return_state)  # fmt: skip
                elif sums is not None:
                    _absorb(work, sums, ks, vs, mask, 0, ks.shape[-2])
                    narrow = _narrow(work, sums)
                    for x, target in zip(qs, targets, strict=True):
                        _query(work, sums, narrow, x, eps, normalize, target)
                else:
                    for x, target in zip(qs, targets, strict=True):
                        _quadratic(work, x, ks, vs, mask, eps, normalize, target)
                if new is not None and sums is not None:
                    lead = len(held_by_state)
                    own = tuple(
                        p if size > 1 else 0
                        for p, size in zip(at[len(at) - lead :], held_by_state, strict=True)
                    )
                    new[0][(i, *own)] = sums[0]
                    new[1][(i, *own)] = sums[1]
    if new is None:
        return out
    if cu_seqlens is None:
        new = _at(new, 0)
    return (out, *new)


def absorb(
    kv: Array, k_sum: Array, k: Array, v: Array, found: FeatureMap, key_mask: Array | None
) -> None:
    """kv (*batch, D, d_v) += phi(k)^T v, k_sum (*batch, D) += phi(k)^T 1, in place.

    As `array.absorb`, but k is that before the map. Keys that all elements of an axis share are
    mapped once.
    """
    masked = () if key_mask is None else key_mask.shape[:-1]
    own = np.broadcast_shapes(k.shape[:-2], v.shape[:-2], masked)
    work = _Work(found, k.dtype)
    with _quiet(np):
        for at in _indices(own):
            to = (..., *(i if size > 1 else slice(None) for i, size in zip(at, own, strict=True)))
            sums = (kv[(*to, slice(None), slice(None))], k_sum[(*to, slice(None))])
            mask = None if key_mask is None else _pick(key_mask, at, 1)
            _absorb(work, sums, _pick(k, at, 2), _pick(v, at, 2), mask, 0, k.shape[-2])


class _Work:
    """What the blocks of a call have in common: the map, their precision, and their memory.

    dtype: float64 where the inputs are, else float32; `exact` is the same in float64
    """

    def __init__(self, found: FeatureMap, dtype: Any) -> None:
        self.found = found
        self.dtype = np.dtype(np.float64 if dtype == np.float64 else np.float32)
        self._held: dict[str, Array] = {}
        self._exact: _Work | None = None

    @property
    def exact(self) -> _Work:
        if self.dtype == np.float64:
            return self
        if self._exact is None:
            self._exact = _Work(self.found, np.float64)
        return self._exact

    def array(self, name: str, *shape: int, dtype: Any = None) -> Array:
        """An array whose memory is that of the last one of this name, and holds anything."""
        size = math.prod(shape)
        held = self._held.get(name)
        if held is None or held.size < size:
            held = self._held[name] = np.empty(size, self.dtype if dtype is None else dtype)
        return held[:size].reshape(shape)

    def prepared(self, x: Array) -> Array:
        return self.found.prepare(cast(x, self.dtype))

    def features(self, x: Array, D: int) -> Array:
        """phi(x): (n, D), and feature by feature in memory."""
        out = self.array("features", D, x.shape[0]).T
        self.found.project_into(cast(x, self.dtype), out)
        return out

    def scores(self, left: Array, k: Array) -> Array:
        """phi(q) . phi(k) from the prepared rows of q."""
        shape = (left.shape[0], k.shape[0])
        t, out = self.array("t", *shape), self.array("scores", *shape)
        self.found.kappa_into(np.matmul(left, self.prepared(k).T, out=t), out)
        return out

    def values(self, v: Array, mask: Array | None) -> Array:
        """Some values, 0 where masked; v itself where it is that already."""
        if mask is None and v.dtype == self.dtype:
            return v
        out = self.array("values", *v.shape)
        out[...] = v
        if mask is not None:  # replaced, not multiplied: what stands there may be NaN
            out[~mask] = 0
        return out

    def product(self, name: str, a: Array, b: Array) -> Array:
        return np.matmul(a, b, out=self.array(name, a.shape[0], b.shape[1]))

    def total(self, a: Array) -> Array:
        """Sums of rows, as a product: NumPy's own take longer."""
        return a @ np.ones((a.shape[1], 1), self.dtype)

    def zeros(self, rows: int, d_v: int) -> tuple[Array, Array]:
        """Numerators and denominators."""
        num = self.array("num", rows, d_v, dtype=np.float64)
        num[...] = 0
        return num, np.zeros((rows, 1))


# One head of one sequence: q (n_q, d_k), k (n_k, d_k), v (n_k, d_v); sums: (kv, k_sum), changed


def _quadratic(
    work: _Work, q: Array, k: Array, v: Array, mask: Array | None, eps: float, normalize: bool,
    target: Array,
) -> None:  # fmt: skip
    for a in range(0, q.shape[0], ROWS):
        rows = q[a : a + ROWS]

        def parts(work: _Work, rows: Array = rows) -> tuple[Array, Array]:
            left = work.prepared(rows)
            num, den = work.zeros(rows.shape[0], v.shape[-1])
            for c in range(0, k.shape[0], KEYS):
                _meet(work, left, k, v, mask, c, c + KEYS, num, den)
            return num, den

        _finish(work, parts, eps, normalize, target[a : a + ROWS])


def _meet(
    work: _Work, left: Array, k: Array, v: Array, mask: Array | None, c: int, d: int, num: Array,
    den: Array,
) -> None:  # fmt: skip
    """The keys c:d, which all rows see, added to the sums of rows."""
    scores = work.scores(left, k[c:d])
    if mask is not None:
        mask = mask[c:d]
        np.copyto(scores, 0, where=~mask)
    num += work.product("part", scores, work.values(v[c:d], mask))
    den += work.total(scores)


def _causal(
    work: _Work, sums: Any, seen: bool, qs: list[Array], k: Array, v: Array, mask: Array | None,
    eps: float, normalize: bool, targets: list[Array], wanted: bool,
) -> None:  # fmt: skip
    """Chunk by chunk; without sums all earlier positions meet the rows of a chunk instead.

    seen: whether the sums hold keys already; wanted: whether they're asked for in the end
    """
    n = k.shape[0]
    for a in range(0, n, ROWS):
        b = min(a + ROWS, n)
        narrow = None
        if sums is not None and (seen or a > 0):
            narrow = _narrow(work, sums)
        for q, target in zip(qs, targets, strict=True):
            rows = q[a:b]

            def parts(
                own: _Work, rows: Array = rows, narrow: Any = narrow, a: int = a, b: int = b
            ) -> tuple[Array, Array]:
                num, den = own.zeros(b - a, v.shape[-1])
                if narrow is not None:
                    past = narrow if own is work else sums
                    phi = own.features(rows, past[0].shape[0])
                    num += own.product("part", phi, past[0])
                    den += own.product("part of den", phi, past[1][:, None])
                left = own.prepared(rows)
                for c in range(0, a if sums is None else 0, KEYS):
                    _meet(own, left, k, v, mask, c, min(c + KEYS, a), num, den)
                _diagonal(own, left, k[a:b], v[a:b], None if mask is None else mask[a:b], num, den)
                return num, den

            _finish(work, parts, eps, normalize, target[a:b])
        if sums is not None and (wanted or b < n):
            _absorb(work, sums, k, v, mask, a, b)


def _diagonal(
    work: _Work, left: Array, k: Array, v: Array, mask: Array | None, num: Array, den: Array
) -> None:
    """The positions of a chunk, each row with the keys up to its own, added to the sums of rows.

    A score above the diagonal is 0, but 0 times an infinite value is NaN: values stay out of the
    product until the row is reached that may see them. A product with a part of them left out is
    to the bit what it would be if they were finite.
    """
    size = k.shape[0]
    row = np.arange(size)
    hidden = row[:, None] < row[None, :]
    if mask is not None:
        hidden |= ~mask
    scores = work.scores(left, k)
    np.copyto(scores, 0, where=hidden)
    den += work.total(scores)
    values = work.values(v, mask)
    bad = ~np.isfinite(values).all(-1)
    if not bad.any():
        num += work.product("part", scores, values)
        return
    cuts = [0, *np.nonzero(bad)[0], size]
    for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
        if start == stop:
            continue
        seen = np.where((row < stop)[:, None], values, 0)
        num[start:stop] += work.product("part", scores, seen)[start:stop]


def _absorb(work: _Work, sums: Any, k: Array, v: Array, mask: Array | None, a: int, b: int) -> None:
    """sums += those of the positions a:b."""
    for c in range(a, b, ROWS):
        d = min(c + ROWS, b)
        here = None if mask is None else mask[c:d]
        kv, k_sum = _sums(work, k[c:d], v[c:d], here, sums[1].shape[-1])
        if work is not work.exact and not (_finite(kv) and _finite(k_sum)):
            kv, k_sum = _sums(work.exact, k[c:d], v[c:d], here, sums[1].shape[-1])
        np.add(sums[0], kv, out=sums[0])
        np.add(sums[1], k_sum, out=sums[1])


def _sums(work: _Work, k: Array, v: Array, mask: Array | None, D: int) -> tuple[Array, Array]:
    phi = work.features(k, D).T
    if mask is not None:
        np.copyto(phi, 0, where=~mask)
    return work.product("sums", phi, work.values(v, mask)), work.total(phi)[:, 0]


def _finite(x: Array) -> bool:
    """Whether all numbers are, without an array of answers."""
    return not x.size or bool(np.isfinite(x.min()) and np.isfinite(x.max()))


def _query(
    work: _Work, sums: Any, narrow: Any, q: Array, eps: float, normalize: bool, target: Array
) -> None:
    for a in range(0, q.shape[0], ROWS):
        rows = q[a : a + ROWS]

        def parts(own: _Work, rows: Array = rows) -> tuple[Array, Array]:
            kv, k_sum = narrow if own is work else sums
            phi = own.features(rows, kv.shape[0])
            num, den = own.zeros(rows.shape[0], kv.shape[1])
            num += own.product("part", phi, kv)
            den += own.product("part of den", phi, k_sum[:, None])
            return num, den

        _finish(work, parts, eps, normalize, target[a : a + ROWS])


def _narrow(work: _Work, sums: Any) -> tuple[Array, Array]:
    """The sums in the precision of blocks."""
    if work is work.exact:
        return sums[0], sums[1]
    kv, k_sum = work.array("kv", *sums[0].shape), work.array("k_sum", *sums[1].shape)
    kv[...], k_sum[...] = sums
    return kv, k_sum


def _finish(
    work: _Work, parts: Callable[[_Work], tuple[Array, Array]], eps: float, normalize: bool,
    target: Array,
) -> None:  # fmt: skip
    """num / (den + eps) of some rows; those that aren't finite once more in float64."""
    result = _ratio(*parts(work), eps, normalize)
    target[...] = result
    if work is not work.exact:
        bad = ~np.isfinite(result).all(-1)
        if bad.any():
            target[bad] = _ratio(*parts(work.exact), eps, normalize)[bad]


def _ratio(num: Array, den: Array, eps: float, normalize: bool) -> Array:
    """In the memory of num."""
    if not normalize:
        return num
    den += eps
    zero = den == 0
    np.divide(num, np.where(zero, 1.0, den), out=num)
    np.copyto(num, 0, where=zero)
    return num


def _start(work: _Work, before: Sums | None, at: tuple[int, ...], D: Any, d_v: int) -> Any:
    """The sums before this call, in memory of their own, to be added to."""
    sums = (
        work.array("state's kv", D, d_v, dtype=np.float64),
        work.array("state's k_sum", D, dtype=np.float64),
    )
    for own, tail in ((0, 2), (1, 1)):
        sums[own][...] = 0 if before is None else _pick(before[own], at, tail)
    return sums


def _pick(x: Array, at: tuple[int, ...], tail: int) -> Array:
    """One element of leading axes that broadcast: the last `tail` axes are left."""
    lead = x.ndim - tail
    own = at[len(at) - lead :] if lead else ()
    return x[tuple(i if x.shape[axis] > 1 else 0 for axis, i in enumerate(own))]
