"""The verbs in plain array operations: serves where there is no compiled core, and checks it.

The same calls as `linattn._native`, with inputs that `_check` has normalised: data arrays of one
dtype, a boolean mask, an `order` that is decided. Sums and products run in float64. NumPy is not
imported here: the namespace is that of the arrays.

Exponential maps. exp(x) is kept as a mantissa in [0.7, 1.5) and an integer power of two, and each
feature d of a state has a power `log_scale[d]` that its sums are divided by. Every rescaling is by
an exact power of two, so that the bits of what was summed don't depend on when it is rescaled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..feature_maps import EXPONENTIAL, cast, elementwise, namespace, signs

__all__ = ["EMPTY", "absorb", "attend", "merge", "query", "softmax", "step"]

Array = Any
Sums = tuple[Any, Any, Any]  # kv (..., D, d_v), k_sum (..., D), log_scale (..., D) or None

EMPTY = -(2**30)  # log_scale of a feature that has seen no key
HEADROOM = 32  # a key above its feature's scale by more than this many powers of two raises it
CHUNK = 64  # positions in a chunk of the causal form
LIMIT = 1 << 17  # numbers in the largest temporary of a block: 1 MiB

LOG2_E = 1.4426950408889634
# ln 2 in two parts: n * LN2_HIGH is exact for |n| < 2^20.
LN2_HIGH = 6.93147180369123816490e-01
LN2_LOW = 1.90821492927058770002e-10
LARGEST = 3.0e8  # arguments of exp beyond it count as this: the exponent has to fit in 30 bits


def attend(
    q: Array,
    k: Array,
    v: Array,
    feature_map: str,
    eps: float,
    causal: bool,
    key_mask: Array | None,
    cu_seqlens: Array | None,
    enable_gqa: bool,
    normalize: bool,
    state: Sums | None,
    return_state: bool,
    order: str,
    out: Array | None,
) -> Any:
    """out (..., n_q, d_v), or (out, kv, k_sum, log_scale) with `return_state`.

    q: (..., n_q, d_k); k: (..., n_k, d_k); v: (..., n_k, d_v); key_mask: (n_k,) or k's shape less
    its last axis; state: kv (..., D, d_v), k_sum (..., D), log_scale (..., D) or None.
    """
    xp = namespace(q)
    D, d_v, n_q = k.shape[-1], v.shape[-1], q.shape[-2]
    past = () if state is None else state[0].shape[:-2]
    if cu_seqlens is not None:
        past = past[1:]
    held = _broadcast(k.shape[:-2], v.shape[:-2], past)  # the batch shape of the new state
    if enable_gqa:
        lead = (*_broadcast(q.shape[:-3], held[:-1]), q.shape[-3])
    else:
        lead = _broadcast(q.shape[:-2], held)
    if out is None:
        out = xp.empty((*lead, n_q, d_v), dtype=q.dtype)
    bounds = [0, q.shape[-2]] if cu_seqlens is None else [int(b) for b in cu_seqlens]
    parts = len(bounds) - 1
    new: Sums | None = None
    if return_state:
        new = _zeros(xp, (parts, *held), D, d_v, feature_map in EXPONENTIAL)
    with _quiet(xp):
        for i in range(parts):
            rows = slice(bounds[i], bounds[i + 1])
            keys = slice(None) if cu_seqlens is None else rows
            before = state
            if state is not None and cu_seqlens is not None:
                before = _at(state, i)
            _attend_one(
                xp,
                q[..., rows, :],
                k[..., keys, :],
                v[..., keys, :],
                feature_map,
                eps,
                causal,
                None if key_mask is None else key_mask[..., keys],
                enable_gqa,
                normalize,
                before,
                None if new is None else _at(new, i),
                order,
                out[..., rows, :],
            )
    if new is None:
        return out
    return (out, *(new if cu_seqlens is not None else _at(new, 0)))


def absorb(
    kv: Array,
    k_sum: Array,
    log_scale: Array | None,
    k: Array,
    v: Array,
    feature_map: str,
    key_mask: Array | None,
) -> bool:
    """kv (*batch, D, d_v) += phi(k)^T v, k_sum (*batch, D) += phi(k)^T 1, in place."""
    xp = namespace(kv)
    with _quiet(xp):
        target = (kv, k_sum, log_scale)
        _absorb(xp, target, target, k, v, feature_map, key_mask)
    return True


def query(
    kv: Array,
    k_sum: Array,
    log_scale: Array | None,
    q: Array,
    feature_map: str,
    eps: float,
    enable_gqa: bool,
    normalize: bool,
    out: Array | None,
) -> Array:
    """out (..., n_q, d_v) = phi(q) kv / (phi(q) k_sum + eps)."""
    xp = namespace(q)
    sums = (kv, k_sum, log_scale)
    if enable_gqa:
        lead = (*_broadcast(q.shape[:-3], kv.shape[:-3]), q.shape[-3])
    else:
        lead = _broadcast(q.shape[:-2], kv.shape[:-2])
    if out is None:
        out = xp.empty((*lead, q.shape[-2], kv.shape[-1]), dtype=q.dtype)
    with _quiet(xp):
        target = out
        if enable_gqa:
            q, sums, target = (
                _grouped(q, kv.shape[-3]),
                _ungrouped(sums),
                _grouped(out, kv.shape[-3]),
            )
        _query(xp, sums, q, feature_map, eps, normalize, target)
    return out


def step(
    kv: Array,
    k_sum: Array,
    log_scale: Array | None,
    q: Array,
    k: Array,
    v: Array,
    feature_map: str,
    eps: float,
    enable_gqa: bool,
    normalize: bool,
    out: Array | None,
) -> Array:
    """Absorb one position, then query it. q, k, v: (..., 1, d)."""
    absorb(kv, k_sum, log_scale, k, v, feature_map, None)
    return query(kv, k_sum, log_scale, q, feature_map, eps, enable_gqa, normalize, out)


def merge(a: Sums, b: Sums) -> Sums:
    """The sums of both, in new arrays; their batch shapes broadcast."""
    xp = namespace(a[0])
    if a[2] is None:
        return a[0] + b[0], a[1] + b[1], None
    with _quiet(xp):
        log_scale = xp.maximum(a[2], b[2])
        a, b = (_rescaled(xp, s, log_scale) for s in (a, b))
        return a[0] + b[0], a[1] + b[1], log_scale


def softmax(
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    causal: bool,
    key_mask: Array | None,
    groups: int,
    out: Array,
) -> None:
    """out (..., n_q, d_v) = softmax(scale q k^T) v, exact, in blocks: no n_q x n_k array exists.

    A running maximum for each row, by which the sums so far are rescaled when it rises (Milakov
    and Gimelshein 2018, "Online normalizer calculation for softmax").
    """
    xp = namespace(q)
    if groups != 1:
        heads = q.shape[-3] // groups
        q, out = _grouped(q, heads), _grouped(out, heads)
        k, v = k[..., None, :, :], v[..., None, :, :]
        if key_mask is not None and key_mask.ndim > 1:
            key_mask = key_mask[..., None, :]
    work = xp.float64 if q.dtype == xp.float64 else xp.float32
    n_q, n_k = q.shape[-2], k.shape[-2]
    lead = out.shape[:-2]
    tall, wide = min(n_q, 256), min(n_k, 512)
    with _quiet(xp):
        for at in _slabs(lead, max(tall * wide, 1)):
            qs, ks, vs = (_take(x, at, len(lead), 2) for x in (q, k, v))
            ms = None if key_mask is None else _take_mask(key_mask, at, len(lead))
            target = _take(out, at, len(lead), 2)
            each = _size(target.shape[:-2])
            # One buffer for all scores: fresh memory for each block would cost a page fault a page.
            buffer = xp.empty(each * tall * wide, dtype=work)
            a = 0
            while a < n_q:
                b = min(a + tall, n_q)
                if causal and b - a > 1 and not xp.isfinite(cast(vs[..., a:b, :], work).sum()):
                    b = a + 1  # so that no later value, times a weight of 0, gets in
                rows = cast(qs[..., a:b, :], work) * scale
                end = b if causal else n_k
                top: Array = None
                num: Array = 0
                den: Array = 0
                for c in range(0, end, max(wide, 1)):
                    d = min(c + wide, end)
                    keys, values = cast(ks[..., c:d, :], work), cast(vs[..., c:d, :], work)
                    scores = buffer[: each * (b - a) * (d - c)]
                    scores = scores.reshape((*target.shape[:-2], b - a, d - c))
                    xp.matmul(rows, keys.swapaxes(-1, -2), out=scores)
                    hidden = None
                    if ms is not None:
                        values = xp.where(ms[..., c:d, None], values, 0)
                        hidden = ~ms[..., None, c:d]
                    if causal and d > a + 1:
                        late = xp.arange(c, d) > xp.arange(a, b)[:, None]
                        hidden = late if hidden is None else hidden | late
                    if hidden is not None:
                        scores[...] = xp.where(hidden, -xp.inf, scores)
                    high = xp.amax(scores, -1)[..., None]
                    if hidden is not None:  # rows that see nothing here: exp(-inf - 0) = 0
                        high = xp.where(high == -xp.inf, xp.finfo(work).min, high)
                    if top is not None:
                        high = xp.maximum(top, high)
                        shrink = xp.exp(top - high)
                        num, den = num * shrink, den * shrink
                    scores -= high
                    xp.exp(scores, out=scores)
                    num = num + scores @ values
                    den = den + scores.sum(-1)[..., None]
                    top = high
                if end == 0:
                    target[..., a:b, :] = 0
                else:
                    zero = den == 0
                    target[..., a:b, :] = xp.where(zero, 0, num / xp.where(zero, 1, den))
                a = b


# One sequence


def _attend_one(
    xp: Any,
    q: Array,
    k: Array,
    v: Array,
    kernel: str,
    eps: float,
    causal: bool,
    mask: Array | None,
    enable_gqa: bool,
    normalize: bool,
    before: Sums | None,
    after: Sums | None,
    order: str,
    out: Array,
) -> None:
    """Fills out, and after where it is wanted (its arrays hold zeros)."""
    D, d_v = k.shape[-1], v.shape[-1]
    if enable_gqa:
        heads = max(k.shape[-3], v.shape[-3], 1 if before is None else before[0].shape[-3])
        q, out = _grouped(q, heads), _grouped(out, heads)
        k, v = k[..., None, :, :], v[..., None, :, :]
        if mask is not None and mask.ndim > 1:
            mask = mask[..., None, :]
        before = None if before is None else _ungrouped(before)
        after = None if after is None else _ungrouped(after)
    if causal or order == "linear":
        if after is None:
            past = () if before is None else before[0].shape[:-2]
            held = _broadcast(k.shape[:-2], v.shape[:-2], past)
            after = _zeros(xp, held, D, d_v, kernel in EXPONENTIAL)
        if before is None:  # not `after`: a shared state is stored once for every group of queries
            before = (
                _zeros(xp, after[0].shape[:-2], D, d_v, kernel in EXPONENTIAL) if causal else after
            )
        if causal:
            _causal(xp, before, after, q, k, v, kernel, mask, eps, normalize, out)
        else:
            _absorb(xp, before, after, k, v, kernel, mask)
            _query(xp, after, q, kernel, eps, normalize, out)
    else:
        _quadratic(xp, q, k, v, kernel, mask, eps, normalize, out)


def _absorb(
    xp: Any,
    before: Sums,
    after: Sums,
    k: Array,
    v: Array,
    kernel: str,
    mask: Array | None,
) -> None:
    """after = before + the sums over k and v."""
    D, d_v = k.shape[-1], v.shape[-1]
    lead = after[0].shape[:-2]
    for at in _slabs(lead, 64 * max(D, d_v)):
        sums = _wide(xp, _take_sums(before, at, len(lead)))
        target = _take_sums(after, at, len(lead))
        ks, vs = _take(k, at, len(lead), 2), _take(v, at, len(lead), 2)
        ms = None if mask is None else _take_mask(mask, at, len(lead))
        lost = _nothing_lost(xp, k, sums)
        rows = min(_block(xp, k, 256), _rows(target[0].shape[:-2], max(D, d_v)))
        for a in range(0, k.shape[-2], rows):
            b = a + rows
            keys, powers, values = _keys(xp, ks, vs, kernel, ms, a, b)
            if powers is not None:
                sums = _raised(xp, sums, _most(xp, powers))
                keys = keys * _power(xp, powers - sums[2][..., None, :])
            sums, lost = _plus(xp, sums, lost, keys.swapaxes(-1, -2) @ values, keys.sum(-2))
        _store(target, sums)


def _query(
    xp: Any, sums: Sums, q: Array, kernel: str, eps: float, normalize: bool, out: Array
) -> None:
    """out (..., n_q, d_v) from kv (..., D, d_v)."""
    D, d_v = q.shape[-1], sums[0].shape[-1]
    lead = out.shape[:-2]
    for at in _slabs(lead, 64 * max(D, d_v)):
        kv, k_sum, log_scale = _wide(xp, _take_sums(sums, at, len(lead)))
        qs, target = _take(q, at, len(lead), 2), _take(out, at, len(lead), 2)
        rows = _rows(target.shape[:-2], max(D, d_v))
        for a in range(0, q.shape[-2], rows):
            b = a + rows
            w, power = _queries(xp, qs[..., a:b, :], kernel, log_scale)
            target[..., a:b, :] = _ratio(xp, w @ kv, w @ k_sum[..., None], power, eps, normalize)


def _causal(
    xp: Any,
    before: Sums,
    after: Sums,
    q: Array,
    k: Array,
    v: Array,
    kernel: str,
    mask: Array | None,
    eps: float,
    normalize: bool,
    out: Array,
) -> None:
    """out[t] from before and the positions up to t; after = all of them.

    Chunk by chunk: the state answers for the earlier chunks, a product under the diagonal for the
    chunk itself. Whole chunks go several at a time, unless one of them has to be cut.
    """
    D, d_v = k.shape[-1], v.shape[-1]
    lead = out.shape[:-2]
    n = q.shape[-2]
    for at in _slabs(lead, CHUNK * max(D, d_v, CHUNK)):
        sums = _wide(xp, _take_sums(before, at, len(lead)))
        lost = _nothing_lost(xp, k, sums)
        qs, ks, vs = (_take(x, at, len(lead), 2) for x in (q, k, v))
        ms = None if mask is None else _take_mask(mask, at, len(lead))
        target = _take(out, at, len(lead), 2)
        together = _rows(target.shape[:-2], max(D, d_v, CHUNK)) // CHUNK * CHUNK
        whole = n // CHUNK * CHUNK
        start = 0
        while start < n:
            stop = min(start + together, whole) if start < whole else n
            keys, powers, values = _keys(xp, ks, vs, kernel, ms, start, stop)
            rows = qs[..., start:stop, :]
            first = sums
            if powers is not None:
                first = _raised(xp, sums, powers[..., 0, :])
            if (
                start < whole
                and xp.isfinite(values.sum())
                and not (powers is not None and _exceeds(powers, first[2][..., None, :]).any())
            ):
                result, sums, lost = _chunks(
                    xp, first, lost, rows, keys, powers, values, kernel, eps, normalize
                )
                target[..., start:stop, :] = result
            else:
                for a in range(0, stop - start, CHUNK):
                    b = min(a + CHUNK, stop - start)
                    sums, lost = _one_chunk(
                        xp,
                        sums,
                        lost,
                        rows[..., a:b, :],
                        keys[..., a:b, :],
                        None if powers is None else powers[..., a:b, :],
                        values[..., a:b, :],
                        kernel,
                        eps,
                        normalize,
                        target[..., start + a : start + b, :],
                    )
            start = stop
        _store(_take_sums(after, at, len(lead)), sums)


def _chunks(
    xp: Any,
    sums: Sums,
    lost: Sums | None,
    q: Array,
    keys: Array,
    powers: Array | None,
    values: Array,
    kernel: str,
    eps: float,
    normalize: bool,
) -> tuple[Array, Sums, Sums | None]:
    """The output of some whole chunks without a cut, and the sums after them (see `_plus`).

    To the bit what `_one_chunk` gives for each of them in turn: which of the two serves may
    depend on later rows, and must not be seen in earlier ones.
    """
    kv, k_sum, log_scale = sums
    w, power = _queries(xp, q, kernel, log_scale)
    if powers is not None:
        keys = keys * _power(xp, powers - log_scale[..., None, :])
    w, keys, values = (_chunked(x) for x in (w, keys, values))
    added = keys.swapaxes(-1, -2) @ values
    sum_added = keys.sum(-2)
    kv = xp.broadcast_to(kv, _broadcast(kv.shape, added[..., 0, :, :].shape))
    k_sum = xp.broadcast_to(k_sum, _broadcast(k_sum.shape, sum_added[..., 0, :].shape))
    held, sum_held = [], []
    for i in range(added.shape[-3]):
        held.append(kv)
        sum_held.append(k_sum[..., None])
        (kv, k_sum, _), lost = _plus(
            xp, (kv, k_sum, log_scale), lost, added[..., i, :, :], sum_added[..., i, :]
        )
    row = xp.arange(CHUNK)
    scores = xp.where(row[:, None] >= row, w @ keys.swapaxes(-1, -2), 0.0)
    numerator = w @ xp.stack(held, -3) + scores @ values
    denominator = w @ xp.stack(sum_held, -3) + scores.sum(-1)[..., None]
    result = _ratio(
        xp,
        numerator.reshape((*numerator.shape[:-3], -1, numerator.shape[-1])),
        denominator.reshape((*denominator.shape[:-3], -1, 1)),
        power,
        eps,
        normalize,
    )
    return result, (kv, k_sum, log_scale), lost


def _chunked(x: Array) -> Array:
    """(..., n, d) -> (..., n / CHUNK, CHUNK, d)."""
    return x.reshape((*x.shape[:-2], -1, CHUNK, x.shape[-1]))


def _one_chunk(
    xp: Any,
    sums: Sums,
    lost: Sums | None,
    q: Array,
    keys: Array,
    powers: Array | None,
    values: Array,
    kernel: str,
    eps: float,
    normalize: bool,
    out: Array,
) -> tuple[Sums, Sums | None]:
    """Fills out for one chunk, whole or not, that may have cuts; the sums after it (see `_plus`).

    Two things would let later rows of a chunk reach earlier ones: a key so large that its
    feature's scale must rise, and a value that isn't finite (0 * NaN above the diagonal). The
    chunk is cut before each such row. Each part is computed as products of the whole chunk's sizes
    with the other rows blanked, because a product of another size rounds otherwise: so the bits of
    position t depend on no later one.
    """
    size = keys.shape[-2]
    row = xp.arange(size)
    under = row[:, None] >= row
    bad = ~xp.isfinite(values)
    a = 0
    while a < size:
        if powers is not None:
            sums = _raised(xp, sums, powers[..., a, :])
        b = _next_cut(xp, a, size, powers, sums, bad)
        w, power = _queries(xp, q, kernel, sums[2])
        part = keys
        if powers is not None:
            part = keys * _power(xp, powers - sums[2][..., None, :])
        inside, seen = values, under
        if b - a < size:
            mine = (row >= a) & (row < b)
            part = xp.where(mine[:, None], part, 0.0)
            inside = xp.where(mine[:, None], values, 0.0)
            seen = under & mine
        scores = xp.where(seen, w @ part.swapaxes(-1, -2), 0.0)
        result = _ratio(
            xp,
            w @ sums[0] + scores @ inside,
            w @ sums[1][..., None] + scores.sum(-1)[..., None],
            power,
            eps,
            normalize,
        )
        out[..., a:b, :] = result[..., a:b, :]
        sums, lost = _plus(xp, sums, lost, part.swapaxes(-1, -2) @ inside, part.sum(-2))
        a = b
    return sums, lost


def _next_cut(xp: Any, a: int, size: int, powers: Array | None, sums: Sums, bad: Array) -> int:
    """The first row after a that must start a part of its own."""
    cut = None
    if bad.any():
        # A column of the state that is NaN already has nothing to lose.
        cut = _any_batch(bad & ~xp.isnan(sums[0]).any(-2)[..., None, :])
    if powers is not None:
        high = _any_batch(_exceeds(powers, sums[2][..., None, :]))
        cut = high if cut is None else cut | high
    if cut is None:
        return size
    later = xp.nonzero(cut[a + 1 :])[0]
    return a + 1 + int(later[0]) if len(later) else size


def _any_batch(x: Array) -> Array:
    """(..., rows, features) -> (rows,)."""
    x = x.any(-1)
    while x.ndim > 1:
        x = x.any(0)
    return x


def _quadratic(
    xp: Any,
    q: Array,
    k: Array,
    v: Array,
    kernel: str,
    mask: Array | None,
    eps: float,
    normalize: bool,
    out: Array,
) -> None:
    """out = (phi(q) phi(k)^T) v in blocks of queries and keys."""
    D, d_v = k.shape[-1], v.shape[-1]
    lead = out.shape[:-2]
    side, wide = 128, _block(xp, k, 128)  # queries and keys of a block
    for at in _slabs(lead, side * max(D, d_v, side)):
        qs, ks, vs = (_take(x, at, len(lead), 2) for x in (q, k, v))
        ms = None if mask is None else _take_mask(mask, at, len(lead))
        target = _take(out, at, len(lead), 2)
        log_scale: Array = None
        if kernel in EXPONENTIAL:
            log_scale = xp.full((*ks.shape[:-2], D), EMPTY, dtype=xp.int64)
            for c in range(0, k.shape[-2], wide):
                powers = _keys(xp, ks, vs, kernel, ms, c, c + wide)[1]
                log_scale = xp.maximum(log_scale, _most(xp, powers))
        for a in range(0, q.shape[-2], side):
            w, power = _queries(xp, qs[..., a : a + side, :], kernel, log_scale)
            num: Array = xp.zeros((*target.shape[:-2], w.shape[-2], d_v), dtype=xp.float64)
            den: Array = xp.zeros((*target.shape[:-2], w.shape[-2], 1), dtype=xp.float64)
            lost = _nothing_lost(xp, q, (num, den, None))
            for c in range(0, k.shape[-2], wide):
                keys, powers, values = _keys(xp, ks, vs, kernel, ms, c, c + wide)
                if powers is not None:
                    keys = keys * _power(xp, powers - log_scale[..., None, :])
                scores = w @ keys.swapaxes(-1, -2)
                (num, den, _), lost = _plus(
                    xp, (num, den, None), lost, scores @ values, scores.sum(-1)[..., None]
                )
            target[..., a : a + side, :] = _ratio(xp, num, den, power, eps, normalize)


# Rows in, rows out


def _keys(
    xp: Any, k: Array, v: Array, kernel: str, mask: Array | None, a: int, b: int
) -> tuple[Array, Array | None, Array]:
    """phi of the keys a:b (for exp: mantissas and powers of two), and their values; masked rows 0.

    Replaced, not multiplied: what stands in a masked row may be NaN.
    """
    x, powers = _features(xp, k[..., a:b, :], kernel)
    values = _dense(v[..., a:b, :], xp.float64)
    if mask is not None:
        part = mask[..., a:b, None]
        x, values = xp.where(part, x, 0.0), xp.where(part, values, 0.0)
        if powers is not None:
            powers = xp.where(part, powers, EMPTY)
    return x, powers, values


def _features(xp: Any, x: Array, kernel: str) -> tuple[Array, Array | None]:
    """phi(x) in float64; for exp a mantissa and a power of two.

    The map itself is evaluated in the precision of x, at least float32: it is elementwise and
    rounds once, while in float64 exp alone takes several times as long.
    """
    if kernel in EXPONENTIAL:
        mantissa, powers = _split(xp, _dense(x, xp.float64))
        return mantissa * signs(xp, x) if kernel == "signed_exp" else mantissa, powers
    wide = xp.float64 if x.dtype == xp.float64 else xp.float32
    return cast(elementwise(xp, kernel, _dense(x, wide)), xp.float64), None


def _dense(x: Array, dtype: Any) -> Array:
    """x as one dense block: products and maps of other layouts round in another order."""
    if not hasattr(x, "flags"):
        return cast(x, dtype).contiguous()
    if x.dtype == dtype and x.flags.c_contiguous and x.flags.aligned:
        return x
    return x.astype(dtype, order="C")


def _queries(xp: Any, q: Array, kernel: str, log_scale: Array | None) -> tuple[Array, Array | None]:
    """phi of queries; for exp in units of the state's scales and of a power of two for each row."""
    x, powers = _features(xp, q, kernel)
    if powers is None or log_scale is None:
        return x, None
    powers = xp.where((log_scale == EMPTY)[..., None, :], EMPTY, powers + log_scale[..., None, :])
    power = xp.amax(powers, -1)[..., None]
    power = xp.where(power < EMPTY // 2, 0, power)
    return x * _power(xp, powers - power), power


def _ratio(
    xp: Any, num: Array, den: Array, power: Array | None, eps: float, normalize: bool
) -> Array:
    """num / (den + eps), and 0 where that denominator is 0; both are in units of 2^power."""
    if not normalize:
        return num if power is None else _scaled(xp, num, power)
    if eps > 0:
        den = den + (eps if power is None else _scaled(xp, xp.full_like(den, eps), -power))
    zero = den == 0
    return xp.where(zero, 0.0, num / xp.where(zero, 1.0, den))


# Sums of many blocks


def _block(xp: Any, x: Array, most: int) -> int:
    """Keys in a block; where nothing wider stands behind its sums, no more than a causal chunk.

    The rounding of a sum of equal terms grows with their number.
    """
    return min(most, CHUNK) if x.dtype == xp.float64 else most


def _nothing_lost(xp: Any, x: Array, sums: Sums) -> Sums | None:
    """What `_plus` begins with: None for inputs whose sums are of a wider dtype than they."""
    return (0.0, 0.0, sums[2]) if x.dtype == xp.float64 else None


def _plus(
    xp: Any, sums: Sums, lost: Sums | None, kv: Array, k_sum: Array
) -> tuple[Sums, Sums | None]:
    """The sums with those of one block more, and what roundings have lost, to be added to the next.

    So that float64 sums of n equal terms are off by a rounding or two and not by n. What was lost
    may be in older scales of an exponential map: the new ones are a power of two away.

    Source: Kahan 1965, "Further remarks on reducing truncation errors".
    """
    if lost is None:
        return (sums[0] + kv, sums[1] + k_sum, sums[2]), None
    if lost[2] is not sums[2]:
        lost = _rescaled(xp, lost, sums[2])
    kv, kv_lost = _added(xp, sums[0], kv + lost[0])
    k_sum, k_sum_lost = _added(xp, sums[1], k_sum + lost[1])
    return (kv, k_sum, sums[2]), (kv_lost, k_sum_lost, sums[2])


def _added(xp: Any, total: Array, term: Array) -> tuple[Array, Array]:
    """total + term, and what its rounding lost; 0 where that is not finite."""
    after = total + term
    lost = term - (after - total)
    return after, xp.where(xp.isfinite(lost), lost, 0.0)


# Powers of two


def _split(xp: Any, x: Array) -> tuple[Array, Array]:
    """exp(x) as a mantissa and an integer power of two; 0 is (0, EMPTY)."""
    finite = xp.isfinite(x)
    t = xp.clip(xp.where(finite, x, 0.0), -LARGEST, LARGEST)
    n = xp.round(t * LOG2_E)
    mantissa = xp.exp((t - n * LN2_HIGH) - n * LN2_LOW)
    powers = cast(n, xp.int64)
    if not finite.all():
        mantissa = xp.where(finite, mantissa, xp.exp(x))  # 0, inf or NaN
        powers = xp.where(mantissa == 0, EMPTY, powers)
    return mantissa, powers


def _power(xp: Any, n: Array) -> Array:
    """2^n in float64, exactly, by its bits; 0 below the normal numbers."""
    return ((xp.clip(n, -1023, 1023) + 1023) << 52).view(xp.float64)


def _scaled(xp: Any, x: Array, n: Array) -> Array:
    """x * 2^n for |n| <= 2000, in two halves; beyond that as if it were 2000."""
    n = xp.clip(n, -2000, 2000)
    half = n >> 1
    return x * _power(xp, half) * _power(xp, n - half)


def _most(xp: Any, powers: Array) -> Array:
    """The largest power of each feature over the rows."""
    if powers.shape[-2] == 0:
        return xp.full((*powers.shape[:-2], powers.shape[-1]), EMPTY, dtype=xp.int64)
    return xp.amax(powers, -2)


def _exceeds(powers: Array, log_scale: Array) -> Array:
    """Where a key calls for a larger scale of its feature."""
    return (powers > log_scale + HEADROOM) | ((log_scale == EMPTY) & (powers != EMPTY))


def _raised(xp: Any, sums: Sums, powers: Array) -> Sums:
    """The same sums with scales that can take keys of these powers."""
    high = _exceeds(powers, sums[2])
    if not high.any():
        return sums
    return _rescaled(xp, sums, xp.where(high, powers, sums[2]))


def _rescaled(xp: Any, sums: Sums, log_scale: Array) -> Sums:
    """The same sums in units of 2^log_scale, which is nowhere less than theirs."""
    by = cast(sums[2], xp.int64) - log_scale
    # + 0.0: no -0.0 is left where something negative vanishes
    kv = _scaled(xp, sums[0], by[..., None]) + 0.0
    return kv, _scaled(xp, sums[1], by) + 0.0, log_scale


# Shapes


def _broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The common shape of shapes that are known to broadcast."""
    width = max(len(s) for s in shapes)
    full = [(1,) * (width - len(s)) + tuple(s) for s in shapes]
    return tuple(next((d for d in column if d != 1), 1) for column in zip(*full, strict=True))


def _size(shape: tuple[int, ...]) -> int:
    count = 1
    for d in shape:
        count *= d
    return count


def _grouped(x: Array, heads: int) -> Array:
    """(..., G heads, n, d) -> (..., heads, G, n, d); a view."""
    groups = x.shape[-3] // heads if heads else 1
    return x.reshape((*x.shape[:-3], heads, groups, *x.shape[-2:]))


def _ungrouped(sums: Sums) -> Sums:
    """An axis of one group behind the heads of a state; views."""
    kv, k_sum, log_scale = sums
    return (
        kv[..., None, :, :],
        k_sum[..., None, :],
        None if log_scale is None else log_scale[..., None, :],
    )


def _zeros(xp: Any, batch: tuple[int, ...], D: int, d_v: int, exponential: bool) -> Sums:
    return (
        xp.zeros((*batch, D, d_v), dtype=xp.float64),
        xp.zeros((*batch, D), dtype=xp.float64),
        xp.full((*batch, D), EMPTY, dtype=xp.int32) if exponential else None,
    )


def _at(sums: Sums, i: int) -> Sums:
    """Views of one sequence's sums."""
    kv, k_sum, log_scale = sums
    return kv[i], k_sum[i], None if log_scale is None else log_scale[i]


def _wide(xp: Any, sums: Sums) -> Sums:
    """For computing: exponents in int64, so that their differences fit."""
    kv, k_sum, log_scale = sums
    return kv, k_sum, None if log_scale is None else cast(log_scale, xp.int64)


def _store(target: Sums, sums: Sums) -> None:
    for to, value in zip(target, sums, strict=True):
        if to is not None:
            to[...] = value


def _slabs(lead: tuple[int, ...], each: int) -> Iterator[tuple[int, ...]]:
    """Indices over as many leading axes as keep the rest's temporaries within LIMIT."""
    axes, rest = 0, each * _size(lead)
    while axes < len(lead) and rest > LIMIT:
        rest //= max(lead[axes], 1)
        axes += 1
    return _indices(lead[:axes])


def _indices(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not shape:
        yield ()
        return
    for i in range(shape[0]):
        for rest in _indices(shape[1:]):
            yield (i, *rest)


def _take(x: Array, at: tuple[int, ...], lead: int, tail: int) -> Array:
    """The view of x that broadcasts against index `at` of a leading shape of `lead` axes."""
    missing = lead - (x.ndim - tail)
    own = at[missing:] if missing > 0 else at
    return x[tuple(i if x.shape[axis] > 1 else 0 for axis, i in enumerate(own))]


def _take_sums(sums: Sums, at: tuple[int, ...], lead: int) -> Sums:
    kv, k_sum, log_scale = sums
    return (
        _take(kv, at, lead, 2),
        _take(k_sum, at, lead, 1),
        None if log_scale is None else _take(log_scale, at, lead, 1),
    )


def _take_mask(mask: Array, at: tuple[int, ...], lead: int) -> Array:
    return _take(mask, at, lead, 1)


def _rows(batch: tuple[int, ...], each: int) -> int:
    """Positions in a block, from the sizes alone."""
    return max(64, min(1024, LIMIT // max(each * _size(batch), 1)))


def _quiet(xp: Any) -> AbstractContextManager[Any]:
    """Overflow and NaN follow the definition; they are no news."""
    return xp.errstate(all="ignore") if hasattr(xp, "errstate") else nullcontext()
