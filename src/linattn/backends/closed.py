"""Maps with a closed form, kappa(q . k) = phi(q) . phi(k): no n x D array of features ever exists.

::

    quadratic:  kappa(q k^T) v                              n_q n_k (d_k + d_v)
    linear:     phi(q) (phi(k)^T v), a block of rows at a time
    causal:     as linear, chunk by chunk, and kappa(q k^T) v under the diagonal of a chunk; where
                that is cheaper, all positions are one chunk

Scores and products are computed in the precision of the inputs, at least float32, block by block;
what blocks give is added up in float64. A row that leaves float32's range on the way is computed
again in float64, by itself, so that no row's bits depend on another.

As in `array`, the namespace is that of the arrays, and the arguments are checked ones.
"""

from __future__ import annotations

from typing import Any

from ..feature_maps import FeatureMap, cast, namespace
from .array import _at, _grouped, _indices, _quiet, _zeros

__all__ = ["attend"]

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
    xp = namespace(q)
    groups, held = 1, out.shape[:-2]  # held: the batch shape of keys
    if enable_gqa:
        heads = max(k.shape[-3], v.shape[-3], 1 if state is None else state[0].shape[-3])
        groups = q.shape[-3] // heads
        q, filled = _grouped(q, heads), _grouped(out, heads)
        held = filled.shape[:-3]
    else:
        q, filled = q[..., None, :, :], out[..., None, :, :]
    past = () if state is None else state[0].shape[(1 if cu_seqlens is not None else 0) : -2]
    held_by_state = xp.broadcast_shapes(k.shape[:-2], v.shape[:-2], past)
    bounds = [0, q.shape[-2]] if cu_seqlens is None else [int(b) for b in cu_seqlens]
    D, d_v = found.width(k.shape[-1]), v.shape[-1]
    new = None
    if return_state:
        new = _zeros(xp, (len(bounds) - 1, *held_by_state), D, d_v, False)  # type: ignore[arg-type]
    linear = order == "linear"
    with _quiet(xp):
        for i in range(len(bounds) - 1):
            rows = slice(bounds[i], bounds[i + 1])
            keys = slice(None) if cu_seqlens is None else rows
            before = state
            if state is not None and cu_seqlens is not None:
                before = _at(state, i)
            for at in _indices(held):
                mask = None if key_mask is None else _pick(key_mask, at, 1)[keys]
                sums = None
                if linear:
                    sums = _start(xp, before, at, D, d_v)
                seen = state is not None
                ks, vs = _pick(k, at, 2)[keys], _pick(v, at, 2)[keys]
                qs = [_pick(q, (*at, g), 2)[rows] for g in range(groups)]
                targets = [filled[(*at, g)][rows] for g in range(groups)]
                if causal:
                    _causal(xp, found, sums, seen, qs, ks, vs, mask, eps, normalize, targets,
                            return_state)  # fmt: skip
                elif linear:
                    _absorb(xp, found, sums, ks, vs, mask, 0, ks.shape[-2])
                    for x, target in zip(qs, targets, strict=True):
                        _query(xp, found, sums, x, eps, normalize, target)
                else:
                    for x, target in zip(qs, targets, strict=True):
                        _quadratic(xp, found, x, ks, vs, mask, eps, normalize, target)
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


# One head of one sequence: q (n_q, d_k), k (n_k, d_k), v (n_k, d_v); sums: [kv, k_sum], changed


def _quadratic(
    xp: Any, found: FeatureMap, q: Array, k: Array, v: Array, mask: Array | None, eps: float,
    normalize: bool, target: Array,
) -> None:  # fmt: skip
    work = _work(xp, q)
    for a in range(0, q.shape[0], ROWS):
        rows = q[a : a + ROWS]

        def parts(work: Any, rows: Array = rows) -> tuple[Array, Array]:
            left = found.prepare(cast(rows, work))
            num: Array = xp.zeros((rows.shape[0], v.shape[-1]), dtype=xp.float64)
            den: Array = xp.zeros((rows.shape[0], 1), dtype=xp.float64)
            for c in range(0, k.shape[0], KEYS):
                num, den = _meet(xp, found, work, left, k, v, mask, c, c + KEYS, num, den)
            return num, den

        _finish(xp, work, parts, eps, normalize, target[a : a + ROWS])


def _meet(
    xp: Any, found: FeatureMap, work: Any, left: Array, k: Array, v: Array, mask: Array | None,
    c: int, d: int, num: Array, den: Array,
) -> tuple[Array, Array]:  # fmt: skip
    """The keys c:d, which all rows see, added to the sums of rows."""
    scores = found.kappa(left @ found.prepare(cast(k[c:d], work)).swapaxes(-1, -2))
    values = cast(v[c:d], work)
    if mask is not None:  # replaced, not multiplied: what stands there may be NaN
        scores = xp.where(mask[None, c:d], scores, 0)
        values = xp.where(mask[c:d, None], values, 0)
    return num + scores @ values, den + scores.sum(-1)[..., None]


def _causal(
    xp: Any, found: FeatureMap, sums: Any, seen: bool, qs: list[Array], k: Array, v: Array,
    mask: Array | None, eps: float, normalize: bool, targets: list[Array], wanted: bool,
) -> None:  # fmt: skip
    """Chunk by chunk; without sums all earlier positions meet the rows of a chunk instead.

    seen: whether the sums hold keys already; wanted: whether they're asked for in the end
    """
    n = k.shape[0]
    work = _work(xp, k)
    for a in range(0, n, ROWS):
        b = min(a + ROWS, n)
        past = sums is not None and (seen or a > 0)
        narrow = cast(sums[0], work) if past else None
        for q, target in zip(qs, targets, strict=True):
            rows = q[a:b]

            def parts(
                work: Any, rows: Array = rows, narrow: Array = narrow, a: int = a, b: int = b
            ) -> tuple[Array, Array]:
                rows = cast(rows, work)
                left = found.prepare(rows)
                if narrow is not None:
                    phi = found.project(rows)  # type: ignore[misc]
                    kv = narrow if narrow.dtype == phi.dtype else sums[0]
                    num: Array = phi @ kv
                    den: Array = phi @ cast(sums[1], phi.dtype)[:, None]
                    num, den = cast(num, xp.float64), cast(den, xp.float64)
                else:
                    num = xp.zeros((b - a, v.shape[-1]), dtype=xp.float64)
                    den = xp.zeros((b - a, 1), dtype=xp.float64)
                    for c in range(0, a if sums is None else 0, KEYS):
                        d = min(c + KEYS, a)
                        num, den = _meet(xp, found, work, left, k, v, mask, c, d, num, den)
                return _diagonal(xp, found, work, left, k, v, mask, a, b, num, den)

            _finish(xp, work, parts, eps, normalize, target[a:b])
        if sums is not None and (wanted or b < n):
            _absorb(xp, found, sums, k, v, mask, a, b)


def _diagonal(
    xp: Any, found: FeatureMap, work: Any, left: Array, k: Array, v: Array, mask: Array | None,
    a: int, b: int, num: Array, den: Array,
) -> tuple[Array, Array]:  # fmt: skip
    """The positions a:b of a chunk, each row with the keys up to its own.

    A score above the diagonal is 0, but 0 times an infinite value is NaN: values stay out of the
    product until the row is reached that may see them. A product with a part of them left out is
    to the bit what it would be if they were finite.
    """
    row = xp.arange(b - a)
    under = row[:, None] >= row[None, :]
    values = cast(v[a:b], work)
    if mask is not None:
        under = under & mask[None, a:b]
        values = xp.where(mask[a:b, None], values, 0)
    scores = found.kappa(left @ found.prepare(cast(k[a:b], work)).swapaxes(-1, -2))
    scores = xp.where(under, scores, 0)
    den = den + scores.sum(-1)[..., None]
    bad = ~xp.isfinite(values).all(-1)
    if not bool(bad.any()):
        return num + scores @ values, den
    cuts = [0, *(int(r) for r in xp.nonzero(bad)[0]), b - a]
    whole = num
    for start, stop in zip(cuts[:-1], cuts[1:], strict=True):
        if start == stop:
            continue
        part = num + scores @ xp.where((row < stop)[:, None], values, 0)
        whole = xp.where(((row >= start) & (row < stop))[:, None], part, whole)
    return whole, den


def _absorb(
    xp: Any, found: FeatureMap, sums: Any, k: Array, v: Array, mask: Array | None, a: int, b: int
) -> None:
    """sums += those of the positions a:b."""
    for c in range(a, b, ROWS):
        d = min(c + ROWS, b)
        kv, k_sum = _sums(xp, found, _work(xp, k), k[c:d], v[c:d], mask, c, d)
        if not bool(xp.isfinite(kv).all() & xp.isfinite(k_sum).all()):
            kv, k_sum = _sums(xp, found, xp.float64, k[c:d], v[c:d], mask, c, d)
        sums[0] = sums[0] + kv
        sums[1] = sums[1] + k_sum


def _sums(
    xp: Any, found: FeatureMap, work: Any, k: Array, v: Array, mask: Array | None, c: int, d: int
) -> tuple[Array, Array]:
    phi, values = found.project(cast(k, work)), cast(v, work)  # type: ignore[misc]
    if mask is not None:
        phi, values = (xp.where(mask[c:d, None], x, 0) for x in (phi, values))
    return phi.swapaxes(-1, -2) @ values, phi.sum(-2)


def _query(
    xp: Any, found: FeatureMap, sums: Any, q: Array, eps: float, normalize: bool, target: Array
) -> None:
    work = _work(xp, q)
    kv, k_sum = cast(sums[0], work), cast(sums[1], work)[:, None]
    for a in range(0, q.shape[0], ROWS):
        rows = q[a : a + ROWS]

        def parts(again: Any, rows: Array = rows) -> tuple[Array, Array]:
            phi = found.project(cast(rows, again))  # type: ignore[misc]
            if again == work:
                return phi @ kv, phi @ k_sum
            return phi @ sums[0], phi @ sums[1][:, None]

        _finish(xp, work, parts, eps, normalize, target[a : a + ROWS])


def _finish(xp: Any, work: Any, parts: Any, eps: float, normalize: bool, target: Array) -> None:
    """num / (den + eps) of some rows; those that aren't finite once more in float64."""
    num, den = parts(work)
    result = _ratio(xp, num, den, eps, normalize)
    if work != xp.float64:
        bad = ~xp.isfinite(result).all(-1)
        if bool(bad.any()):
            num, den = parts(xp.float64)
            again = _ratio(xp, num, den, eps, normalize)
            result = xp.where(bad[..., None], again, result)
    target[...] = result


def _ratio(xp: Any, num: Array, den: Array, eps: float, normalize: bool) -> Array:
    num = cast(num, xp.float64)
    if not normalize:
        return num
    den = cast(den, xp.float64) + eps
    zero = den == 0
    return xp.where(zero, 0.0, num / xp.where(zero, 1.0, den))


def _work(xp: Any, x: Array) -> Any:
    return xp.float64 if x.dtype == xp.float64 else xp.float32


def _start(xp: Any, before: Sums | None, at: tuple[int, ...], D: Any, d_v: int) -> list[Array]:
    """The sums before this call, to be added to."""
    if before is None:
        return [xp.zeros((D, d_v), dtype=xp.float64), xp.zeros((D,), dtype=xp.float64)]
    return [_pick(before[0], at, 2), _pick(before[1], at, 1)]


def _pick(x: Array, at: tuple[int, ...], tail: int) -> Array:
    """One element of leading axes that broadcast: the last `tail` axes are left."""
    lead = x.ndim - tail
    own = at[len(at) - lead :] if lead else ()
    return x[tuple(i if x.shape[axis] > 1 else 0 for axis, i in enumerate(own))]
