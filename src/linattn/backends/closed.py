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
the page faults of the next block took three quarters of a call. Memory that isn't large stays for
the next call of the thread: the faults of a short one take longer than its arithmetic, too.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..feature_maps import FeatureMap, cast
from .array import _at, _grouped, _indices, _quiet, _zeros

__all__ = ["absorb", "attend", "query"]

Array = Any

ROWS = 256  # queries in a block, and positions in a chunk
KEYS = 512  # keys that meet them
KEPT = 1 << 24  # bytes of memory for blocks that a thread keeps for its next call

_spare = threading.local()


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
    state: tuple[Any, Any, Any] | None,
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
    with _quiet(np), _memory() as arrays:
        work = _Work(found, q.dtype, arrays)
        for i in range(len(bounds) - 1):
            rows = slice(bounds[i], bounds[i + 1])
            keys = slice(None) if cu_seqlens is None else rows
            before = state
            if state is not None and cu_seqlens is not None:
                before = _at(state, i)
            for at in _indices(held):
                mask = None if key_mask is None else _pick(key_mask, at, 1)[keys]
                sums = _start(work, before, at, D, d_v) if linear else None  # type: ignore[arg-type]
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
                    new[0][(i, *own)] = sums.kv
                    new[1][(i, *own)] = sums.k_sum
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
    with _quiet(np), _memory() as arrays:
        work = _Work(found, k.dtype, arrays)
        for at in _indices(own):
            to = (..., *(i if size > 1 else slice(None) for i, size in zip(at, own, strict=True)))
            target = (kv[(*to, slice(None), slice(None))], k_sum[(*to, slice(None))])
            sums = _Sums(*target, target)
            mask = None if key_mask is None else _pick(key_mask, at, 1)
            _absorb(work, sums, _pick(k, at, 2), _pick(v, at, 2), mask, 0, k.shape[-2])


def query(
    kv: Array, k_sum: Array, q: Array, found: FeatureMap, eps: float, enable_gqa: bool,
    normalize: bool, out: Array,
) -> None:  # fmt: skip
    """out = phi(q) kv / (phi(q) k_sum + eps): attention to no key but the state's."""
    lead = (1,) if enable_gqa else ()
    k, v = (np.empty((*lead, 0, size), q.dtype) for size in (q.shape[-1], kv.shape[-1]))
    attend(
        q, k, v, found, eps, False, None, None, enable_gqa, normalize, (kv, k_sum, None), False,
        "linear", out,
    )  # fmt: skip


@contextmanager
def _memory() -> Iterator[dict[Any, Array]]:
    """What the thread's last call has left; a call inside a call finds nothing."""
    arrays = vars(_spare).pop("arrays", {})
    yield arrays
    if sum(x.nbytes for x in arrays.values()) <= KEPT:
        _spare.arrays = arrays


class _Work:
    """What the blocks of a call have in common: the map, their precision, and their memory.

    dtype: float64 where the inputs are, else float32; `exact` is the same in float64
    """

    def __init__(self, found: FeatureMap, dtype: Any, arrays: dict[Any, Array]) -> None:
        self.found = found
        self.dtype = np.dtype(np.float64 if dtype == np.float64 else np.float32)
        self._arrays = arrays
        self.exact = self
        if self.dtype != np.float64:
            self.exact = _Work(found, np.float64, arrays)

    def array(self, name: str, *shape: int, dtype: Any = None) -> Array:
        """An array whose memory is that of the last one of this name, and holds anything."""
        size, key = math.prod(shape), (name, np.dtype(dtype or self.dtype))
        held = self._arrays.get(key)
        if held is None or held.size < size:
            held = self._arrays[key] = np.empty(size, key[1])
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


class _Sums:
    """kv (D, d_v) and k_sum (D,) before some keys, and where those after them are to be."""

    def __init__(self, kv: Array, k_sum: Array, to: tuple[Array, ...]) -> None:
        self.kv, self.k_sum = kv, k_sum
        self._to = to

    def add(self, kv: Array, k_sum: Array) -> None:
        self.kv = np.add(self.kv, kv, out=self._to[0])
        self.k_sum = np.add(self.k_sum, k_sum, out=self._to[1])


# One head of one sequence: q (n_q, d_k), k (n_k, d_k), v (n_k, d_v)


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
    work: _Work, sums: _Sums | None, seen: bool, qs: list[Array], k: Array, v: Array,
    mask: Array | None, eps: float, normalize: bool, targets: list[Array], wanted: bool,
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
                if narrow is not None and sums is not None:
                    past = narrow if own is work else (sums.kv, sums.k_sum)
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


def _absorb(
    work: _Work, sums: _Sums, k: Array, v: Array, mask: Array | None, a: int, b: int
) -> None:
    """sums += those of the positions a:b."""
    D = sums.k_sum.shape[-1]
    for c in range(a, b, ROWS):
        d = min(c + ROWS, b)
        here = None if mask is None else mask[c:d]
        kv, k_sum = _sums(work, k[c:d], v[c:d], here, D)
        if work is not work.exact and not (_finite(kv) and _finite(k_sum)):
            kv, k_sum = _sums(work.exact, k[c:d], v[c:d], here, D)
        sums.add(kv, k_sum)


def _sums(work: _Work, k: Array, v: Array, mask: Array | None, D: int) -> tuple[Array, Array]:
    phi = work.features(k, D).T
    if mask is not None:
        np.copyto(phi, 0, where=~mask)
    return work.product("sums", phi, work.values(v, mask)), work.total(phi)[:, 0]


def _finite(x: Array) -> bool:
    """Whether all numbers are, without an array of answers."""
    return not x.size or bool(np.isfinite(x.min()) and np.isfinite(x.max()))


def _query(
    work: _Work, sums: _Sums, narrow: Any, q: Array, eps: float, normalize: bool, target: Array
) -> None:
    for a in range(0, q.shape[0], ROWS):
        rows = q[a : a + ROWS]

        def parts(own: _Work, rows: Array = rows) -> tuple[Array, Array]:
            kv, k_sum = narrow if own is work else (sums.kv, sums.k_sum)
            phi = own.features(rows, kv.shape[0])
            num, den = own.zeros(rows.shape[0], kv.shape[1])
            num += own.product("part", phi, kv)
            den += own.product("part of den", phi, k_sum[:, None])
            return num, den

        _finish(work, parts, eps, normalize, target[a : a + ROWS])


def _narrow(work: _Work, sums: Any) -> tuple[Array, Array]:
    """The sums in the precision of blocks."""
    if work is work.exact:
        return sums.kv, sums.k_sum
    kv, k_sum = work.array("kv", *sums.kv.shape), work.array("k_sum", *sums.k_sum.shape)
    kv[...], k_sum[...] = sums.kv, sums.k_sum
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


def _start(
    work: _Work, before: tuple[Any, ...] | None, at: tuple[int, ...], D: int, d_v: int
) -> _Sums:
    """The sums before this call."""
    if before is None:
        zero = np.zeros(1)  # of many shapes, and no memory
        kv, k_sum = np.broadcast_to(zero, (D, d_v)), np.broadcast_to(zero, (D,))
    else:
        kv, k_sum = _pick(before[0], at, 2), _pick(before[1], at, 1)
    own = tuple(
        work.array(f"state's {name}", *x.shape, dtype=np.float64)
        for name, x in (("kv", kv), ("k_sum", k_sum))
    )
    return _Sums(kv, k_sum, own)


def _pick(x: Array, at: tuple[int, ...], tail: int) -> Array:
    """One element of leading axes that broadcast: the last `tail` axes are left."""
    lead = x.ndim - tail
    own = at[len(at) - lead :] if lead else ()
    return x[tuple(i if x.shape[axis] > 1 else 0 for axis, i in enumerate(own))]
