"""Attention and its gradient in torch operations.

They serve where the compiled core doesn't, and check it.

`attend` is functional and looks at no number, so that it works under every transform of
torch.func, on every device, and can be differentiated any number of times. `backward` is its first
derivative written out in two passes over the sequence, so that nothing of size n * D is kept.

Exponential maps. exp(x) is kept as a mantissa in [0.7, 1.5) and an integer power of two, and each
feature d of a state has a power `log_scale[d]` that its sums are divided by. Powers are integers
and carry no gradient: exp(x) = m 2^n has the derivative m 2^n, which is that of m at constant n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..feature_maps import EXPONENTIAL, signs
from . import _maps

__all__ = [
    "EMPTY",
    "Call",
    "Part",
    "Sums",
    "attend",
    "backward",
    "finite_part",
    "is_finite",
    "merge",
    "ratio",
    "weighed",
    "wide",
]

Shape = tuple[int, ...]

EMPTY = -(2**30)  # log_scale of a feature that has seen no key
CHUNK = 64  # positions in a chunk of the causal form
CHUNK_EXP = 16  # the same where each pair of a chunk has powers of its own, as exp's do
LIMIT = 1 << 20  # numbers in the largest temporary of a block
LARGEST = 3.0e8  # arguments of exp beyond it count as this: the exponent has to fit in 30 bits
LOG2_E = 1.4426950408889634
# ln 2 in two parts; n times the first is exact for |n| < 2^20, in float32 for |n| < 2^15.
LN2 = {
    torch.float64: (6.93147180369123816490e-01, 1.90821492927058770002e-10),
    torch.float32: (0.693359375, -2.12194440e-4),
}


class Sums(NamedTuple):
    """A state: kv (*batch, D, d_v), k_sum (*batch, D), log_scale (*batch, D) or None."""

    kv: Tensor
    k_sum: Tensor
    log_scale: Tensor | None

    def each(self, change: Callable[[Tensor], Tensor]) -> Sums:
        return Sums(
            change(self.kv),
            change(self.k_sum),
            None if self.log_scale is None else change(self.log_scale),
        )


class Rows(NamedTuple):
    """phi of some rows, f * 2**n; n is None for all maps but exp."""

    f: Tensor
    n: Tensor | None


_narrow: dict[torch.device, torch.dtype] = {}


def wide(device: torch.device) -> torch.dtype:
    """The dtype of sums: float64, or float32 on a device that hasn't got it."""
    found = _narrow.get(device)
    if found is None:
        try:
            torch.empty(0, dtype=torch.float64, device=device)
            found = torch.float64
        except (TypeError, RuntimeError):
            found = torch.float32
        _narrow[device] = found
    return found


# Whole calls


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: str,
    eps: float,
    causal: bool,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    enable_gqa: bool,
    normalize: bool,
    state: Sums | None,
    return_state: bool,
    units: Tensor | None = None,
    in_place: bool = False,
) -> tuple[Tensor, Sums | None]:
    """out (..., n_q, d_v) in the dtype of q, and the state after all keys.

    units: the log_scale that the state is to have, where it isn't this function's own choice
    in_place: fill one array, which no transform of torch.func and no gradient allows
    """
    call = Call(q, k, v, kernel, key_mask, cu_seqlens, enable_gqa, state)
    out = q.new_empty(call.shape) if in_place else None
    parts, states = [], []
    for part in call.parts():
        target = None if out is None else call.rows_of(out, part)
        rows, after = _forward(part, kernel, eps, causal, normalize, return_state, target)
        parts.append(rows)
        states.append(after)
    if out is None:
        out = call.joined(parts, q.dtype)
    if not return_state:
        return out, None
    return out, _in_units(call.state_of(states), units)


def backward(
    grad_out: Tensor,
    grad_kv: Tensor | None,
    grad_k_sum: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    kernel: str,
    eps: float,
    causal: bool,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    enable_gqa: bool,
    normalize: bool,
    state: Sums | None,
    units: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k, v and of the sums of the state given, as those are stored.

    units: the log_scale of the state that grad_kv and grad_k_sum belong to

    ::

        num_i = phi(q_i) S_i,  den_i = phi(q_i) . Z_i + eps,  out_i = num_i / den_i
        dnum_i = dout_i / den_i,  dden_i = -dnum_i . out_i
        dphi(q_i) = S_i dnum_i + Z_i dden_i
        R_j = sum_i phi(q_i)^T dnum_i,  r_j = sum_i phi(q_i) dden_i     i over the rows that see j
        dphi(k_j) = R_j v_j + r_j,  dv_j = phi(k_j) R_j

    R and r are a state too, of queries where S and Z are of keys; the causal form walks it
    backwards. In exp's pairs the powers of a row are those that its denominator is in units of.
    """
    call = Call(q, k, v, kernel, key_mask, cu_seqlens, enable_gqa, state)
    dq, dk, dv = (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        *(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v)),
    )
    befores = []
    for part in call.parts():
        after = None
        if grad_kv is not None and grad_k_sum is not None:
            after = call.sums_of(Sums(grad_kv, grad_k_sum, units), part)
        to = (call.rows_of(dq, part), call.keys_of(dk, part), call.keys_of(dv, part))
        rows = (call.rows_of(grad_out, part), call.rows_of(out, part))
        befores.append(_backward(part, *rows, after, kernel, eps, causal, normalize, *to))
    if state is None:
        return dq, dk, dv, None, None
    before = call.state_of(befores)
    return dq, dk, dv, before.kv, before.k_sum


def merge(a: Sums, b: Sums) -> Sums:
    """The sums of both; their batch shapes broadcast."""
    if a.log_scale is None or b.log_scale is None:
        return Sums(a.kv + b.kv, a.k_sum + b.k_sum, None)
    scale = torch.maximum(a.log_scale, b.log_scale).to(torch.int64)
    a, b = _rescaled(a, scale), _rescaled(b, scale)
    return Sums(a.kv + b.kv, a.k_sum + b.k_sum, scale.to(torch.int32))


# The shapes of a call


class Part(NamedTuple):
    """One sequence: arrays whose leading axes broadcast."""

    sequence: int
    rows: slice
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    before: Sums


class Call:
    """Grouped heads as an axis of their own, packed sequences as parts; and back."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kernel: str,
        mask: Tensor | None,
        cuts: Tensor | None,
        grouped: bool,
        state: Sums | None,
        D: int | None = None,
    ) -> None:
        """D: features of a state, where k has others: before its map."""
        past: Shape = () if state is None else tuple(state.kv.shape[:-2])
        self.packed = cuts is not None
        if self.packed:
            past = past[1:]
        self.held = tuple(torch.broadcast_shapes(k.shape[:-2], v.shape[:-2], past))
        self.grouped, self.exponential = grouped, kernel in EXPONENTIAL
        self.D, self.d_v = k.shape[-1] if D is None else D, v.shape[-1]
        if grouped:
            lead = (*torch.broadcast_shapes(q.shape[:-3], self.held[:-1]), q.shape[-3])
        else:
            lead = tuple(torch.broadcast_shapes(q.shape[:-2], self.held))
        self.shape = (*lead, q.shape[-2], v.shape[-1])
        self.q, self.k, self.v, self.mask, self.state = q, k, v, mask, state
        if cuts is None:
            self.bounds = [0, q.shape[-2]]
        else:
            self.bounds = [int(b) for b in cuts.tolist()]

    def parts(self) -> Iterator[Part]:
        for i, (a, b) in enumerate(zip(self.bounds, self.bounds[1:], strict=False)):
            rows = slice(a, b)
            keys = rows if self.packed else slice(None)
            if self.state is None:
                before = self._zeros(self.held)
            else:
                before = self.state
                if self.packed:
                    before = before.each(itemgetter(i))
                if before.log_scale is not None:
                    before = before._replace(log_scale=before.log_scale.to(torch.int64))
            q, k, v, mask = self.q, self.k, self.v, self.mask
            if mask is not None:
                mask = mask[..., keys]
            if self.grouped:
                q = self._split(q)
                k, v = k.unsqueeze(-3), v.unsqueeze(-3)
                mask = mask.unsqueeze(-2) if mask is not None and mask.ndim > 1 else mask
                before = Sums(
                    before.kv.unsqueeze(-3),
                    before.k_sum.unsqueeze(-2),
                    None if before.log_scale is None else before.log_scale.unsqueeze(-2),
                )
            yield Part(i, rows, q[..., rows, :], k[..., keys, :], v[..., keys, :], mask, before)

    def _zeros(self, batch: Shape) -> Sums:
        """To be read alone: one zero for all sums."""
        like, dtype = self.q, wide(self.q.device)
        zero = like.new_zeros((1,) * (len(batch) + 2), dtype=dtype)
        return Sums(
            zero.expand(*batch, self.D, self.d_v),
            zero[..., 0].expand(*batch, self.D),
            like.new_full((*batch, self.D), EMPTY, dtype=torch.int64) if self.exponential else None,
        )

    def _split(self, x: Tensor) -> Tensor:
        """(..., G heads, n, d) -> (..., heads, G, n, d); a view."""
        heads = self.held[-1]
        return x.unflatten(-3, (heads, x.shape[-3] // heads if heads else 1))

    def rows_of(self, x: Tensor, part: Part) -> Tensor:
        """The view of an array like q or out that is this part's."""
        x = x[..., part.rows, :]
        return self._split(x) if self.grouped else x

    def keys_of(self, x: Tensor, part: Part) -> Tensor:
        x = x[..., part.rows, :] if self.packed else x
        return x.unsqueeze(-3) if self.grouped else x

    def sums_of(self, sums: Sums, part: Part) -> Sums:
        if self.packed:
            sums = sums.each(lambda x: x[part.sequence])
        if self.grouped:
            kv, k_sum, scale = sums
            scale = None if scale is None else scale.unsqueeze(-2)
            sums = Sums(kv.unsqueeze(-3), k_sum.unsqueeze(-2), scale)
        return sums

    def joined(self, parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        if not parts:  # no sequence at all
            return self.q.new_empty(self.shape)
        out = parts[0] if len(parts) == 1 else torch.cat(parts, -2)
        return out.flatten(-4, -3) if self.grouped else out

    def state_of(self, states: list[Sums]) -> Sums:
        """What the parts were left with, in the batch shape of a state."""
        shape, D, d_v = self.held, self.D, self.d_v
        if not states:  # no sequence at all
            kv, k_sum, scale = self._zeros((0, *shape))
            return Sums(kv, k_sum, None if scale is None else scale.to(torch.int32))
        made = []
        for kv, k_sum, scale in states:
            if self.grouped:
                kv, k_sum = kv.squeeze(-3), k_sum.squeeze(-2)
                scale = None if scale is None else scale.squeeze(-2)
            kv, k_sum = kv.expand(*shape, D, d_v), k_sum.expand(*shape, D)
            scale = None if scale is None else scale.expand(*shape, D).to(torch.int32)
            made.append(Sums(kv, k_sum, scale))
        if not self.packed:
            return made[0].each(lambda x: x.contiguous())
        kv, k_sum = torch.stack([s.kv for s in made]), torch.stack([s.k_sum for s in made])
        scales = [s.log_scale for s in made if s.log_scale is not None]
        return Sums(kv, k_sum, torch.stack(scales) if scales else None)


def _in_units(sums: Sums, units: Tensor | None) -> Sums:
    """The same sums, with another log_scale."""
    if units is None or sums.log_scale is None:
        return sums
    return _rescaled(sums, units.to(torch.int64))._replace(log_scale=units)


# One sequence


def _forward(
    part: Part,
    kernel: str,
    eps: float,
    causal: bool,
    normalize: bool,
    return_state: bool,
    out: Tensor | None,
) -> tuple[Tensor, Sums]:
    """The rows of out, in `out` where it is given, and the state after the keys."""
    sums, done = part.before, []

    def put(rows: slice, num: Tensor, den: Tensor, power: Tensor | None) -> None:
        result = ratio(num, den, power, eps, normalize).to(part.q.dtype)
        if out is None:
            done.append(result)
        else:
            out[..., rows, :] = result

    if causal:
        finite = is_finite(part.v)
        for rows in _chunks(part.q.shape[-2], CHUNK_EXP if kernel in EXPONENTIAL else CHUNK):
            w, keys, values = _chunk(part, kernel, rows)
            pairs = _Pairs(w, keys, sums)
            scores = pairs.scores()
            num = pairs.w @ sums.kv + weighed(scores, values, finite)
            den = _dot(pairs.w, sums.k_sum) + scores.sum(-1, keepdim=True)
            put(rows, num, den, pairs.power)
            sums = _added(sums, keys, values)
    else:
        for rows in _chunks(part.k.shape[-2], _block(part)):
            sums = _added(sums, *_keys(part, kernel, rows))
        if part.q.shape[-2]:
            for rows in _chunks(part.q.shape[-2], _block(part)):
                asked, power = _queries(_features(part.q[..., rows, :], kernel), sums)
                put(rows, asked @ sums.kv, _dot(asked, sums.k_sum), power)
    if out is not None:
        return out, sums
    if not done:
        shape = torch.broadcast_shapes(part.q.shape[:-2], sums.kv.shape[:-2], part.v.shape[:-2])
        return part.q.new_empty((*shape, 0, part.v.shape[-1])), sums
    return (done[0] if len(done) == 1 else torch.cat(done, -2)), sums


def _backward(
    part: Part,
    grad_out: Tensor,
    out: Tensor,
    grad_after: Sums | None,
    kernel: str,
    eps: float,
    causal: bool,
    normalize: bool,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> Sums:
    """Fills dq, dk and dv; the gradients of the sums before, as those are stored."""
    before = part.before
    exact = before.kv.dtype
    lead = out.shape[:-2]
    size = (CHUNK_EXP if kernel in EXPONENTIAL else CHUNK) if causal else _block(part)
    inverse = out.new_empty((*lead, out.shape[-2], 1), dtype=exact)  # 1 / den
    power = None  # that den is in units of
    if kernel in EXPONENTIAL:
        power = out.new_zeros((*lead, out.shape[-2], 1), dtype=torch.int64)

    def upstream(rows: slice) -> tuple[Tensor, Tensor]:
        """dnum and dden of some rows, times 2^power."""
        by = grad_out[..., rows, :].to(exact)
        if not normalize:
            return by, by.new_zeros((*by.shape[:-1], 1))
        by = by * inverse[..., rows, :]
        # Zero gradients where out is 0 by a denominator of 0, whatever stands upstream.
        by = torch.where(inverse[..., rows, :] == 0, 0.0, by)
        return by, -(by * out[..., rows, :].to(exact)).sum(-1, keepdim=True)

    def take(rows: slice, den: Tensor, at: Tensor | None) -> None:
        if not normalize:  # units stay 1
            return
        den = _with_eps(den, at, eps)
        inverse[..., rows, :] = torch.where(den == 0, 0.0, 1.0 / torch.where(den == 0, 1.0, den))
        if power is not None and at is not None:
            power[..., rows, :] = at

    def finish(rows: slice, x: Tensor, features: Rows, dphi: Tensor, to: Tensor, kept: Any) -> None:
        """to[rows] = dphi * phi'(x), where exp's dphi is a derivative by x already."""
        if features.n is None:
            dphi = dphi * _maps.slope(kernel, x[..., rows, :].to(exact), features.f)
        if kept is not None:  # NaN may stand where not, in x too
            dphi = torch.where(kept, dphi, 0.0)
        to[..., rows, :] = dphi.sum_to_size(to[..., rows, :].shape).to(to.dtype)

    # First pass: denominators, and the gradients of queries, which need the sums before a row.
    sums = before
    if not causal:
        for rows in _chunks(part.k.shape[-2], size):
            sums = _added(sums, *_keys(part, kernel, rows))
    for rows in _chunks(part.q.shape[-2], size):
        if causal:
            queries, keys, values = _chunk(part, kernel, rows)
            pairs = _Pairs(queries, keys, sums)
            scores = pairs.scores()
            w, at = pairs.w, pairs.power
            take(rows, _dot(w, sums.k_sum) + scores.sum(-1, keepdim=True), at)
            dnum, dden = upstream(rows)
            slopes = pairs.lower(dnum @ finite_part(values).mT + dden)
            inside: Tensor | float = pairs.to_queries(slopes)
        else:
            queries = _features(part.q[..., rows, :], kernel)
            w, at = _queries(queries, sums)
            take(rows, _dot(w, sums.k_sum), at)
            dnum, dden = upstream(rows)
            inside = 0.0
        dphi = dnum @ sums.kv.mT + dden * sums.k_sum.unsqueeze(-2)
        if at is not None:
            dphi = w * dphi
        dphi = dphi + inside
        if at is not None and not normalize:  # dnum was in units of 1
            dphi = _scaled(dphi, at)
        finish(rows, part.q, queries, dphi, dq, None)
        if causal:
            sums = _added(sums, keys, values)

    # Second pass, backwards: R and r, the sums over the queries that see a key.
    batch = torch.broadcast_shapes(lead, before.kv.shape[:-2])
    seen = _gradient_sums(before, batch, grad_after)

    def gathered(seen: Sums, queries: Rows, rows: slice, dnum: Tensor, dden: Tensor) -> Sums:
        n = queries.n
        if n is not None and power is not None:
            n = torch.where(n == EMPTY, EMPTY, n - power[..., rows, :])
        values = torch.cat([dnum, dden], -1)
        kv, _, scale = _added(Sums(seen.kv, seen.k_sum, seen.log_scale), Rows(queries.f, n), values)
        return Sums(kv, seen.k_sum, scale)

    if not causal:
        for rows in _chunks(part.q.shape[-2], size):
            queries = _features(part.q[..., rows, :], kernel)
            seen = gathered(seen, queries, rows, *upstream(rows))
    blocks = list(_chunks(part.k.shape[-2], size))
    for rows in reversed(blocks):
        keys, values = _keys(part, kernel, rows)
        R, _, scale = seen
        R, r = R[..., :-1], R[..., -1]
        weights = keys.f
        if keys.n is not None and scale is not None:
            weights = _scaled(
                keys.f, torch.where(scale == EMPTY, EMPTY, scale)[..., None, :] + keys.n
            )
        dphi = values @ R.mT + r.unsqueeze(-2)
        if keys.n is not None:
            dphi = weights * dphi
        dvalues = weights @ R
        if causal:
            queries = _features(part.q[..., rows, :], kernel)
            at = None if power is None else power[..., rows, :]
            pairs = _Pairs(queries, keys, None, at)
            dnum, dden = upstream(rows)
            slopes = pairs.lower(dnum @ values.mT + dden)
            dphi = dphi + pairs.to_keys(slopes)
            dvalues = dvalues + pairs.scores().mT @ dnum
            seen = gathered(seen, queries, rows, dnum, dden)
        kept = None if part.mask is None else part.mask[..., rows, None]
        if kept is not None:
            dvalues = torch.where(kept, dvalues, 0.0)
        finish(rows, part.k, keys, dphi, dk, kept)
        dv[..., rows, :] = dvalues.sum_to_size(dv[..., rows, :].shape).to(dv.dtype)
    R, _, scale = seen
    if scale is not None and before.log_scale is not None:
        by = torch.where(
            (scale == EMPTY) | (before.log_scale == EMPTY), EMPTY, scale + before.log_scale
        )
        R = _scaled(R, by[..., None])
    R = R.sum_to_size((*before.kv.shape[:-1], before.kv.shape[-1] + 1))
    return Sums(R[..., :-1], R[..., -1], None)


def _gradient_sums(before: Sums, batch: Shape, grad_after: Sums | None) -> Sums:
    """R with r as its last column, to begin with: what comes from the state after all keys."""
    kv, k_sum, scale = before
    D, d_v = kv.shape[-2:]
    if grad_after is None:
        R = kv.new_zeros((*batch, D, d_v + 1))
        if scale is not None:
            scale = torch.full_like(scale, EMPTY).expand(*batch, D)
        return Sums(R, k_sum.new_zeros((*batch, D)), scale)
    R = torch.cat([grad_after.kv, grad_after.k_sum.unsqueeze(-1)], -1).to(kv.dtype)
    R = R.reshape((*(1,) * (len(batch) + 2 - R.ndim), *R.shape))
    # Each group of queries, and each copy of what is broadcast, counts it once in all.
    extra = [i for i, (a, b) in enumerate(zip(R.shape[:-2], batch, strict=False)) if a != b]
    first = R.new_zeros((*batch, D, d_v + 1))
    at: list[Any] = [slice(None)] * len(batch)
    for i in extra:
        at[i] = slice(0, 1)
    first[tuple(at)] = R
    if scale is not None and grad_after.log_scale is not None:
        units = grad_after.log_scale.to(torch.int64)
        scale = torch.where(units == EMPTY, EMPTY, -units).expand(*batch, D)
    return Sums(first, k_sum.new_zeros((*batch, D)), scale)


# Pairs of a chunk


class _Pairs:
    """phi(q_i) . phi(k_j) for the rows i of a chunk and j <= i, in units of 2^power_i."""

    def __init__(
        self, queries: Rows, keys: Rows, sums: Sums | None, power: Tensor | None = None
    ) -> None:
        """The power of a row is what its denominator needs, or one that was kept."""
        self.queries, self.keys, self.power = queries, keys, power
        self.w = queries.f  # in units of the sums before and of the power
        row = torch.arange(keys.f.shape[-2], device=keys.f.device)
        self.seen = row[:, None] >= row
        if queries.n is None or keys.n is None:
            return
        if sums is not None and sums.log_scale is not None:
            scale = sums.log_scale.unsqueeze(-2)
            top = torch.maximum(torch.cummax(keys.n, -2).values, scale)  # of the keys a row sees
            power = torch.where(top == EMPTY, EMPTY, queries.n + top).amax(-1, keepdim=True)
            self.power = power = torch.where(power < EMPTY // 2, 0, power)
            held = torch.where(scale == EMPTY, EMPTY, queries.n + scale)
            self.w = queries.f * _power(held - power, queries.f.dtype)
        assert power is not None
        n = queries.n.unsqueeze(-2) + keys.n.unsqueeze(-3) - power.unsqueeze(-1)
        # Later keys may be too large for these units: at most 1, as they aren't used.
        n = n.clamp(max=0) if sums is not None else n
        f = queries.f.unsqueeze(-2) * keys.f.unsqueeze(-3)
        self.each = torch.where(self.seen[..., None], _scaled(f, n), 0.0)  # (..., i, j, D)

    def lower(self, x: Tensor) -> Tensor:
        """x with 0 above the diagonal, whatever stood there."""
        return torch.where(self.seen, x, 0.0)

    def scores(self) -> Tensor:
        if self.power is not None:
            return self.each.sum(-1)
        return self.lower(self.queries.f @ self.keys.f.mT)

    def to_queries(self, slopes: Tensor) -> Tensor:
        """From d/dscore to d/dphi(q), exp's by q itself."""
        if self.power is not None:
            return (self.each * slopes.unsqueeze(-1)).sum(-2)
        return slopes @ finite_part(self.keys.f)

    def to_keys(self, slopes: Tensor) -> Tensor:
        if self.power is not None:
            return (self.each * slopes.unsqueeze(-1)).sum(-3)
        return slopes.mT @ self.queries.f


def weighed(scores: Tensor, values: Tensor, finite: bool) -> Tensor:
    """scores @ values; no value of a later row, times a score of 0, reaches an earlier one."""
    if finite:
        return scores @ values
    total = scores @ finite_part(values)
    dtype = values.dtype
    above, below = (scores > 0).to(dtype), (scores < 0).to(dtype)
    high, low = (values == torch.inf).to(dtype), (values == -torch.inf).to(dtype)
    row = torch.arange(values.shape[-2], device=values.device)
    neither = (row[:, None] >= row).to(dtype) - above - below
    up, down = above @ high + below @ low, above @ low + below @ high
    # What isn't finite in a row that is seen, times 0 or NaN; or both infinities.
    unknown = neither @ (high + low) + (above + below + neither) @ torch.isnan(values).to(dtype)
    special = torch.where(up > 0, torch.inf, -torch.inf)
    special = torch.where((unknown > 0) | ((up > 0) & (down > 0)), torch.nan, special)
    return torch.where(up + down + unknown > 0, special, total)


def finite_part(x: Tensor) -> Tensor:
    return torch.where(torch.isfinite(x), x, 0.0)


def is_finite(x: Tensor) -> bool:
    """Whether all numbers are; False where they can't be read."""
    if (
        x.device.type == "meta"
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or type(x) not in (Tensor, torch.nn.Parameter)  # one that stands for another
    ):
        return False
    return bool(torch.isfinite(x.detach().sum(dtype=wide(x.device))))


# Rows in, rows out


def _chunk(part: Part, kernel: str, rows: slice) -> tuple[Rows, Rows, Tensor]:
    return (_features(part.q[..., rows, :], kernel), *_keys(part, kernel, rows))


def _keys(part: Part, kernel: str, rows: slice) -> tuple[Rows, Tensor]:
    """phi of some keys and their values, 0 in masked rows.

    Replaced, not multiplied, and before the map: what stands in a masked row may be NaN, and its
    gradient is 0.
    """
    k, v = part.k[..., rows, :], part.v[..., rows, :]
    if part.mask is None:
        return _features(k, kernel), v.to(part.before.kv.dtype)
    kept = part.mask[..., rows, None]
    f, n = _features(torch.where(kept, k, 0.0), kernel)
    n = None if n is None else torch.where(kept, n, EMPTY)
    v = torch.where(kept, v, 0.0).to(part.before.kv.dtype)
    return Rows(torch.where(kept, f, 0.0), n), v


def _features(x: Tensor, kernel: str) -> Rows:
    """phi(x) in the dtype of sums; for exp a mantissa and a power of two.

    An elementwise map rounds once, so it is evaluated in the precision of x, at least float32.
    """
    dtype = wide(x.device)
    if kernel in EXPONENTIAL:
        f, n = _mantissa(x.to(dtype))
        return Rows(f * signs(torch, x) if kernel == "signed_exp" else f, n)
    x = x if x.dtype == torch.float64 else x.to(torch.float32)
    return Rows(_maps.apply(kernel, x).to(dtype), None)


def _queries(rows: Rows, sums: Sums) -> tuple[Tensor, Tensor | None]:
    """phi(q) in units of the state's scales and of a power of two for each row."""
    if rows.n is None or sums.log_scale is None:
        return rows.f, None
    scale = sums.log_scale.unsqueeze(-2)
    n = torch.where(scale == EMPTY, EMPTY, rows.n + scale)
    power = n.amax(-1, keepdim=True)
    power = torch.where(power < EMPTY // 2, 0, power)
    return rows.f * _power(n - power, rows.f.dtype), power


def _added(sums: Sums, keys: Rows, values: Tensor) -> Sums:
    """The sums after some keys."""
    f = keys.f
    if keys.n is not None and sums.log_scale is not None and keys.n.shape[-2]:
        scale = torch.maximum(sums.log_scale, keys.n.amax(-2))
        sums = _rescaled(sums, scale)
        f = f * _power(keys.n - scale.unsqueeze(-2), f.dtype)
    return Sums(sums.kv + f.mT @ values, sums.k_sum + f.sum(-2), sums.log_scale)


def _dot(w: Tensor, k_sum: Tensor) -> Tensor:
    return w @ k_sum.unsqueeze(-1)


def ratio(num: Tensor, den: Tensor, power: Tensor | None, eps: float, normalize: bool) -> Tensor:
    """num / (den + eps), and 0 where that denominator is 0; both are in units of 2^power."""
    if not normalize:
        return num if power is None else _scaled(num, power)
    den = _with_eps(den, power, eps)
    zero = den == 0
    return torch.where(zero, 0.0, num / torch.where(zero, 1.0, den))


def _with_eps(den: Tensor, power: Tensor | None, eps: float) -> Tensor:
    if not eps:
        return den
    return den + (eps if power is None else _scaled(torch.full_like(den, eps), -power))


# Powers of two


def _mantissa(x: Tensor) -> Rows:
    """exp(x) as f * 2**n; 0 is (0, EMPTY), and what isn't finite has n = 0."""
    finite = torch.isfinite(x)
    t = torch.where(finite, x, 0.0).clamp(-LARGEST, LARGEST)
    n = torch.round(t.detach() * LOG2_E)
    high, low = LN2[x.dtype]
    f = torch.exp((t - n * high) - n * low)
    special = torch.where(x > 0, torch.inf, torch.where(x < 0, 0.0, torch.nan)).to(x.dtype)
    powers = torch.where(x == -torch.inf, EMPTY, n.to(torch.int64))
    return Rows(torch.where(finite, f, special), powers)


def _power(n: Tensor, dtype: torch.dtype) -> Tensor:
    """2^n exactly, by its bits; 0 below the normal numbers."""
    if dtype == torch.float64:
        return ((n.clamp(-1023, 1023) + 1023) << 52).view(torch.float64)
    return ((n.clamp(-127, 127) + 127) << 23).to(torch.int32).view(torch.float32)


def _scaled(x: Tensor, n: Tensor) -> Tensor:
    """x * 2^n, in two halves, so that neither leaves the range before x does."""
    n = n.clamp(-2000, 2000)
    half = n >> 1
    return x * _power(half, x.dtype) * _power(n - half, x.dtype)


def _rescaled(sums: Sums, scale: Tensor) -> Sums:
    """The same sums in units of 2^scale."""
    assert sums.log_scale is not None
    by = sums.log_scale.to(torch.int64) - scale
    # + 0.0: no -0.0 is left where something negative vanishes
    return Sums(_scaled(sums.kv, by.unsqueeze(-1)) + 0.0, _scaled(sums.k_sum, by) + 0.0, scale)


# Blocks


def _chunks(n: int, size: int) -> Iterator[slice]:
    for a in range(0, n, size):
        yield slice(a, min(a + size, n))


def _block(part: Part) -> int:
    """Positions in a block, from the sizes alone."""
    batch = 1
    for d in torch.broadcast_shapes(part.q.shape[:-2], part.before.kv.shape[:-2]):
        batch *= d
    return max(64, min(1024, LIMIT // max(batch * max(part.k.shape[-1], part.v.shape[-1]), 1)))
