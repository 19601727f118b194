"""Maps with a closed form on tensors, kappa(q . k) = phi(q) . phi(k), and their gradient.

As in `linattn.backends.closed` no n x D array of features exists, forwards or backwards: features
are made for a block of rows, if at all. In torch operations, on any device.

With y = [v, 1], S = [kv, k_sum] and u = [dnum, dden], the gradients of a row's two sums::

    quadratic:  dt = kappa'(t) (u y^T),  t = prepare(q) prepare(k)^T      a block of pairs at a time
                dprepare(q) = dt prepare(k),  dprepare(k) = dt^T prepare(q),  dv = kappa(t)^T dnum
    linear:     R = phi(q)^T u                                            a block of rows at a time
                dphi(q) = u S^T,  dphi(k) = y R^T,  dv = phi(k) R         (of R all but its last)
    causal:     both: pairs inside a chunk, and running sums S forwards and R backwards outside

What a map does to a block, `project`, `prepare` and `kappa`, is differentiated by torch while the
block lasts. Blocks are computed in the precision of the inputs, at least float32, and added up in
float64. Rows that leave float32's range are computed again in float64; a gradient that does, the
gradient of its heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backends.closed import KEYS, ROWS
from ..feature_maps import FeatureMap
from . import _arguments, _direct, _roads
from ._composite import Call, Part, Sums, finite_part, is_finite, ratio, weighed, wide

__all__ = ["Options", "absorbed", "attend", "serves"]

At = tuple[slice, ...]  # which elements of the leading axes
Targets = tuple[Tensor, ...]  # dq, dk, dv

FEATURES = 128  # rows whose features exist at a time; more are slower, as they leave the caches
LEAST = 32  # rows in a block that is smaller as it has several queries for each key
# Numbers in the largest temporary of a piece: many small heads go together, large ones alone.
LIMIT, LIMIT_ELSEWHERE = 1 << 18, 1 << 25
# Denominators beyond it, or below its inverse, whose terms float32 may lose.
LARGE = 2.0**63


class Options(NamedTuple):
    """What a call says beside its tensors."""

    found: FeatureMap
    eps: float
    causal: bool
    enable_gqa: bool
    normalize: bool
    return_state: bool
    order: str

    @property
    def linear(self) -> bool:
        return self.order == "linear"


def serves(found: FeatureMap, *tensors: Tensor) -> bool:
    """Whether a call is computed here.

    Where torch records operations, for a transform or a trace, features are expanded instead: the
    record doesn't grow with the number of blocks then. torch.compile and torch.export record one
    operator, see `_closed_ops`.
    """
    if not found.closed_form or getattr(found, "learned", False):  # weights may want a gradient
        return False
    return torch.compiler.is_compiling() or not (
        _roads.transformed()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._is_tracing()
        or any(type(x) not in (Tensor, torch.nn.Parameter) for x in tensors)
    )


def attend(
    q: Tensor, k: Tensor, v: Tensor, options: Options, key_mask: Tensor | None,
    cuts: Tensor | None, sums: Sums | None,
) -> tuple[Tensor, Sums | None]:  # fmt: skip
    """out (..., n_q, d_v), and the state after all keys with `return_state`.

    Arguments have been checked; order is "linear" or "quadratic", which in the causal form means
    one chunk of all positions, or in a graph what was asked for.
    """
    kv, k_sum, _ = sums or (None, None, None)
    given = [x for x in (q, k, v, kv, k_sum) if x is not None]
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in given)
    if wanted:
        q, k, v, kv, k_sum = _expanded(q, k, v, kv, k_sum, cuts, options.enable_gqa)
    if torch.compiler.is_compiling():
        out, _, kv, k_sum = torch.ops.linattn.closed.default(
            q, k, v, options.found.name, *options[1:], key_mask, cuts, kv, k_sum
        )
        return out, Sums(kv, k_sum, None) if options.return_state else None
    if wanted:
        made = _Attend.apply(q, k, v, kv, k_sum, key_mask, cuts, options)
        return (made[0], Sums(made[1], made[2], None)) if options.return_state else (made, None)
    out, _, after = _attended(q, k, v, key_mask, cuts, sums, options, False)
    return out, after


def absorbed(
    found: FeatureMap, k: Tensor, v: Tensor, key_mask: Tensor | None, sums: Sums | None
) -> Sums:
    """The state after some more keys."""
    none = k.new_empty((*k.shape[:-2], 0, k.shape[-1]))
    options = Options(found, 0.0, False, False, True, True, "linear")
    after = attend(none, k, v, options, key_mask, None, sums)[1]
    assert after is not None
    return after


def _expanded(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor | None, k_sum: Tensor | None,
    cuts: Tensor | None, grouped: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """Views in which each element has a gradient of its own; torch adds those of what was one."""
    packed = 0 if cuts is None else 1
    past = () if kv is None else tuple(kv.shape[packed:-2])
    held = _arguments.joint_shape(tuple(k.shape[:-2]), tuple(v.shape[:-2]), past)
    if grouped:
        lead = (*_arguments.joint_shape(tuple(q.shape[:-3]), held[:-1]), q.shape[-3])
    else:
        lead = _arguments.joint_shape(tuple(q.shape[:-2]), held)
    q, k, v = q.expand(*lead, *q.shape[-2:]), *(x.expand(*held, *x.shape[-2:]) for x in (k, v))
    if kv is not None and k_sum is not None:
        missing = len(held) - len(past)
        if packed:
            kv, k_sum = (x.unflatten(0, (-1, *(1,) * missing)) for x in (kv, k_sum))
            held = (kv.shape[0], *held)
        kv, k_sum = kv.expand(*held, *kv.shape[-2:]), k_sum.expand(*held, k_sum.shape[-1])
    return q, k, v, kv, k_sum


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, kv: Tensor | None, k_sum: Tensor | None,
        key_mask: Tensor | None, cuts: Tensor | None, options: Options,
    ) -> Any:  # fmt: skip
        sums = None if kv is None or k_sum is None else Sums(kv, k_sum, None)
        out, den, after = _attended(q, k, v, key_mask, cuts, sums, options, options.normalize)
        ctx.options = options
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, kv, k_sum, key_mask, cuts, out, den)
        return out if after is None else (out, after.kv, after.k_sum)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        q, k, v, kv, k_sum, key_mask, cuts, out, den = ctx.saved_tensors
        sums = None if kv is None else Sums(kv, k_sum, None)
        if torch.is_grad_enabled():  # the gradient is to be differentiated itself
            five = _again(ctx, grads, q, k, v, key_mask, cuts, sums)
        else:
            five = _gradients(grads, q, k, v, key_mask, cuts, sums, ctx.options, out, den)
        return (*five, None, None, None)


def _again(
    ctx: Any, grads: tuple[Tensor | None, ...], q: Tensor, k: Tensor, v: Tensor,
    key_mask: Tensor | None, cuts: Tensor | None, sums: Sums | None,
) -> list[Tensor | None]:  # fmt: skip
    """The gradient as torch makes it of expanded features, whose every derivative it knows."""

    def apart(x: Tensor) -> Tensor:  # where one was computed from another
        return x.view_as(x) if x.requires_grad else x

    q, k, v = apart(q), apart(k), apart(v)
    sums = None if sums is None else sums.each(apart)
    o = ctx.options
    out, after = _roads.expanded(
        o.found, q, k, v, o.eps, o.causal, key_mask, cuts, o.enable_gqa, o.normalize, sums,
        o.return_state, "linear",
    )  # fmt: skip
    made = [out] if after is None else [out, after.kv, after.k_sum]
    pairs = [(y, g) for y, g in zip(made, grads, strict=True) if g is not None and y.requires_grad]
    if not pairs:
        return [None] * 5
    own = (q, k, v) if sums is None else (q, k, v, sums.kv, sums.k_sum)
    wanted = [i for i in range(len(own)) if ctx.needs_input_grad[i]]
    found = torch.autograd.grad(
        [y for y, _ in pairs], [own[i] for i in wanted], [g for _, g in pairs],
        create_graph=True, allow_unused=True,
    )  # fmt: skip
    five: list[Tensor | None] = [None] * 5
    for i, x in zip(wanted, found, strict=True):
        five[i] = x
    return five


# Whole calls


def _attended(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, cuts: Tensor | None,
    sums: Sums | None, options: Options, keep: bool,
) -> tuple[Tensor, Tensor | None, Sums | None]:  # fmt: skip
    """out, the denominators less eps if they are to be kept, the state if it is asked for."""
    found, linear = options.found, options.linear
    call = Call(q, k, v, "identity", key_mask, cuts, options.enable_gqa, sums, D=_width(found, k))
    out = q.new_empty(call.shape)
    den = out.new_empty((*call.shape[:-1], 1), dtype=wide(q.device)) if keep else None
    states = []
    with torch.no_grad(), _no_autocast(q):
        for part in call.parts():
            after = None
            if options.return_state:
                after = part.before.each(lambda x: x.new_empty(x.shape))
                states.append(after)
            to, under = call.rows_of(out, part), None if den is None else call.rows_of(den, part)
            for at in _pieces(part, linear):
                piece = _Piece(part, at, found, options.causal, sums is not None)
                left = _forward(piece, options, _at(to, at, 2), _maybe_at(under, at))
                if after is not None:
                    _at(after.kv, at, 2).copy_(left.kv)
                    _at(after.k_sum, at, 1).copy_(left.k_sum)
        return out, den, call.state_of(states) if options.return_state else None


def _gradients(
    grads: tuple[Tensor | None, ...], q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None,
    cuts: Tensor | None, sums: Sums | None, options: Options, out: Tensor, den: Tensor | None,
) -> list[Tensor | None]:  # fmt: skip
    """Of q, k, v, kv and k_sum, each of which has its full batch shape."""
    found, linear = options.found, options.linear
    call = Call(q, k, v, "identity", key_mask, cuts, options.enable_gqa, sums, D=_width(found, k))
    grad_out, grad_kv, grad_k_sum = (*grads, None, None)[:3]
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    befores = []
    with torch.no_grad(), _no_autocast(q):
        for part in call.parts():
            R = None  # the gradient of the state after the keys
            if grad_kv is not None or grad_k_sum is not None or sums is not None:
                shape = (*part.before.k_sum.shape, call.d_v + 1)
                R = out.new_zeros(shape, dtype=wide(q.device))
            for grad, where in ((grad_kv, slice(0, -1)), (grad_k_sum, -1)):
                if grad is not None and R is not None:
                    own = grad[part.sequence] if call.packed else grad
                    target = R[..., where]
                    target.copy_(own.reshape(target.shape))
            to = (call.rows_of(dq, part), call.keys_of(dk, part), call.keys_of(dv, part))
            by, of = call.rows_of(grad_out, part), call.rows_of(out, part)
            under = None if den is None else call.rows_of(den, part)
            for at in _pieces(part, linear):
                piece = _Piece(part, at, found, options.causal, sums is not None)
                before = _backward(
                    piece, options, _at(by, at, 2), _at(of, at, 2), _maybe_at(under, at),
                    _maybe_at(R, at), tuple(_at(x, at, 2) for x in to),
                )  # fmt: skip
                if R is not None and before is not None:
                    _at(R, at, 2).copy_(before)
            if R is not None:
                befores.append(Sums(R[..., :-1], R[..., -1], None))
        if sums is None:
            return [dq, dk, dv, None, None]
        return [dq, dk, dv, *call.state_of(befores)[:2]]


def _width(found: FeatureMap, k: Tensor) -> int:
    D = found.width(k.shape[-1])
    assert D is not None
    return D


def _no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Inputs have the dtype that is wanted, and the products of blocks theirs."""
    if not torch.amp.is_autocast_available(x.device.type):
        return nullcontext()
    return torch.autocast(x.device.type, enabled=False)


# Pieces: elements of the leading axes that are computed together


def _pieces(part: Part, linear: bool) -> Iterator[At]:
    """Of the batch shape of keys; none where there is nothing to compute."""
    q, k = part.q, part.k
    if q.device.type == "meta":
        return
    held = part.before.k_sum.shape[:-1]
    n_q, n_k = min(q.shape[-2], ROWS), min(k.shape[-2], KEYS)
    numbers = n_q * n_k * _copies(part)
    if linear:
        D, d_v = part.before.kv.shape[-2:]
        numbers = max(numbers, D * (d_v + max(n_q * _copies(part), n_k)))
    limit = LIMIT if q.device.type == "cpu" else LIMIT_ELSEWHERE
    apart, together = len(held), 1
    while apart and together * held[apart - 1] * numbers <= limit:
        apart -= 1
        together *= held[apart]
    for index in itertools.product(*map(range, held[:apart])):
        yield (*(slice(i, i + 1) for i in index), *(slice(None),) * (len(held) - apart))


def _copies(part: Part) -> int:
    """Queries for each key: of grouped heads, and along leading axes that keys haven't got."""
    held = part.before.k_sum.shape[:-1]
    lead = _arguments.joint_shape(tuple(part.q.shape[:-2]), tuple(held))
    count = 1
    for i, size in enumerate(reversed(lead)):
        count *= size if i >= len(held) or held[-1 - i] == 1 else 1
    return max(count, 1)


def _at(x: Tensor, at: At, tail: int) -> Tensor:
    """The view of these elements; the last `tail` axes are no leading ones."""
    lead = x.ndim - tail
    own = [slice(None)] * lead
    for i in range(1, min(lead, len(at)) + 1):
        if x.shape[lead - i] > 1:
            own[lead - i] = at[-i]
    return x[tuple(own)]


def _blocks(start: int, stop: int, size: int) -> Iterator[slice]:
    for a in range(start, stop, size):
        yield slice(a, min(a + size, stop))


def _maybe_at(x: Tensor | None, at: At) -> Tensor | None:
    return None if x is None else _at(x, at, 2)


class _Piece:
    """q (..., n_q, d_k), k (..., n_k, d_k), v (..., n_k, d_v), and what is done to their blocks.

    size: rows in a block; of several queries for each key fewer
    seen: whether the sums before hold keys
    work, exact: dtypes of blocks, and of what they add up to
    """

    def __init__(self, part: Part, at: At, found: FeatureMap, causal: bool, seen: bool) -> None:
        self.q, self.k, self.v = (_at(x, at, 2) for x in (part.q, part.k, part.v))
        self.mask = None if part.mask is None else _at(part.mask, at, 1)
        self.before = Sums(_at(part.before.kv, at, 2), _at(part.before.k_sum, at, 1), None)
        assert found.project is not None
        self.project, self.prepare, self.kappa = found.project, found.prepare, found.kappa
        self.causal, self.seen = causal, seen
        self.n_q, self.n_k = self.q.shape[-2], self.k.shape[-2]
        self.size = max(ROWS // _copies(part), LEAST)
        self.exact = wide(self.q.device)
        self.work = self.exact if self.q.dtype == torch.float64 else torch.float32

    def queries(self, rows: slice, dtype: torch.dtype) -> Tensor:
        return self.q[..., rows, :].to(dtype)

    def keys(self, rows: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        """Some keys and values, 0 where masked, as NaN may stand there; and which take part."""
        k, v = self.k[..., rows, :], self.v[..., rows, :]
        if self.mask is None:
            return k.to(dtype), v.to(dtype), None
        kept = self.mask[..., rows]
        k, v = (torch.where(kept.unsqueeze(-1), x, 0.0) for x in (k, v))
        return k.to(dtype), v.to(dtype), kept

    def pairs(self, rows: slice, linear: bool) -> Iterator[slice]:
        """Blocks of keys that meet some rows pair by pair; a diagonal one is `rows` itself."""
        if self.causal:
            yield from () if linear else _blocks(0, rows.start, KEYS)
            yield rows
        elif not linear:
            yield from _blocks(0, self.n_k, KEYS)

    def visible(self, rows: slice, keys: slice, kept: Tensor | None) -> Tensor | None:
        """Which pairs count; None: all."""
        if kept is not None:
            kept = kept.unsqueeze(-2)
        if keys is not rows:
            return kept
        count = rows.stop - rows.start
        under = torch.ones((count, count), dtype=torch.bool, device=self.q.device).tril()
        return under if kept is None else under & kept

    def added(self, sums: Sums, rows: slice) -> Sums:
        """The sums after some more keys."""
        for part in _blocks(rows.start, rows.stop, FEATURES):
            sums = self._added(sums, part)
        return sums

    def _added(self, sums: Sums, rows: slice) -> Sums:
        k, v, kept = self.keys(rows, self.work)
        kv, k_sum = self.sums(k, v, kept)
        if self.work != self.exact and not (is_finite(kv) and is_finite(k_sum)):
            kv, k_sum = self.sums(*self.keys(rows, self.exact))
        return Sums(sums.kv + kv, sums.k_sum + k_sum, None)

    def sums(self, k: Tensor, v: Tensor, kept: Tensor | None) -> tuple[Tensor, Tensor]:
        phi = self.project(k)
        if kept is not None:
            phi = torch.where(kept.unsqueeze(-1), phi, 0.0)
        return phi.mT @ v, phi.sum(-2)


# Forwards


def _forward(piece: _Piece, options: Options, out: Tensor, under: Tensor | None) -> Sums:
    """Fills out (..., n_q, d_v) and under (..., n_q, 1), the denominators less eps."""
    causal, linear = piece.causal, options.linear
    sums = piece.before
    if linear and not causal:
        sums = piece.added(sums, slice(0, piece.n_k))
    narrow = _narrow(sums, piece) if linear and not causal else None
    for rows in _blocks(0, piece.n_q, piece.size):
        if causal and linear:
            narrow = _narrow(sums, piece) if piece.seen or rows.start else None
        num, den = _sums_of(piece, rows, linear, narrow, piece.work)
        result = ratio(num, den, None, options.eps, options.normalize)
        if piece.work != piece.exact and not is_finite(result):
            past = None if narrow is None else sums
            exactly = _sums_of(piece, rows, linear, past, piece.exact)
            again = ratio(*exactly, None, options.eps, options.normalize)
            bad = ~torch.isfinite(result).all(-1, keepdim=True)
            result, den = torch.where(bad, again, result), torch.where(bad, exactly[1], den)
        out[..., rows, :] = result
        if under is not None:
            under[..., rows, :] = den
        if causal and linear and (options.return_state or rows.stop < piece.n_q):
            sums = piece.added(sums, rows)
    return sums


def _narrow(sums: Sums, piece: _Piece) -> Sums:
    return sums.each(lambda x: x.to(piece.work))


def _sums_of(
    piece: _Piece, rows: slice, linear: bool, past: Sums | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """num and den of some rows; past: sums of keys that all of them see."""
    x = piece.queries(rows, dtype)
    num = den = x.new_zeros((1, 1), dtype=piece.exact)
    if past is not None:
        S = torch.cat([past.kv, past.k_sum.unsqueeze(-1)], -1)
        both = torch.cat([piece.project(part) @ S for part in x.split(FEATURES, -2)], -2)
        num, den = num + both[..., :-1], den + both[..., -1:]
    left = None
    for keys in piece.pairs(rows, linear):
        left = piece.prepare(x) if left is None else left
        k, v, kept = piece.keys(keys, dtype)
        scores = piece.kappa(left @ piece.prepare(k).mT)
        visible = piece.visible(rows, keys, kept)
        if visible is not None:
            scores = torch.where(visible, scores, 0.0)
        num = num + weighed(scores, v, keys is not rows or is_finite(v))
        den = den + scores.sum(-1, keepdim=True)
    return num, den


# Backwards


def _backward(
    piece: _Piece, options: Options, grad_out: Tensor, out: Tensor, under: Tensor | None,
    after: Tensor | None, to: Targets,
) -> Tensor | None:  # fmt: skip
    """Fills dq, dk and dv; after -> before: the gradient [dkv, dk_sum] of the sums, if any."""
    inverse = None
    if under is not None:
        den = under + options.eps
        inverse = torch.where(den == 0, 0.0, 1.0 / torch.where(den == 0, 1.0, den))
    walk = _linearly if options.linear else _pairwise

    def upstream(rows: slice, dtype: torch.dtype) -> Tensor:
        """[dnum, dden] of some rows."""
        by = grad_out[..., rows, :].to(piece.exact)
        if inverse is None:
            return torch.cat([by, by.new_zeros((*by.shape[:-1], 1))], -1).to(dtype)
        at = inverse[..., rows, :]
        # 0 where out is 0 by a denominator of 0, whatever stands upstream
        by = torch.where(at == 0, 0.0, by * at)
        dden = -(by * out[..., rows, :].to(piece.exact)).sum(-1, keepdim=True)
        return torch.cat([by, dden], -1).to(dtype)

    if piece.work == piece.exact or inverse is None or _is_moderate(inverse):
        before = walk(piece, upstream, after, to, piece.work)
        made = to if before is None else (*to, before)
        if piece.work == piece.exact or all(map(is_finite, made)):
            return before
    return walk(piece, upstream, after, to, piece.exact)


def _is_moderate(x: Tensor) -> bool:
    size = x.abs()
    return bool(((size <= LARGE) & ((size >= 1 / LARGE) | (size == 0))).all())


Upstream = Callable[[slice, torch.dtype], Tensor]


def _pairwise(
    piece: _Piece, upstream: Upstream, after: Tensor | None, to: Targets,
    dtype: torch.dtype,
) -> Tensor | None:  # fmt: skip
    """The quadratic order, causal or not. No state takes part, so `after` is left alone."""
    dq, dk, dv = to
    dright, dvalues = (torch.zeros_like(x, dtype=piece.exact) for x in (piece.k, piece.v))
    for rows in _blocks(0, piece.n_q, piece.size):
        left, pull = _pullback(piece.prepare, piece.queries(rows, dtype))
        u = upstream(rows, dtype)
        dleft = left.new_zeros((1, 1), dtype=piece.exact)
        for keys in piece.pairs(rows, False):
            k, v, kept = piece.keys(keys, dtype)
            right = piece.prepare(k)
            scores, dt = _pair(piece, rows, keys, left, right, v, kept, u)
            dleft = dleft + dt @ (finite_part(right) if keys is rows else right)
            _add(dright[..., keys, :], dt.mT @ left)
            _add(dvalues[..., keys, :], scores.mT @ u[..., :-1])
        dq[..., rows, :] = pull(dleft.expand(left.shape).to(dtype))
    for keys in _blocks(0, piece.n_k, KEYS):
        k, _, kept = piece.keys(keys, dtype)
        right, pull = _pullback(piece.prepare, k)
        _put(dk, keys, pull(dright[..., keys, :].to(dtype)), kept)
        _put(dv, keys, dvalues[..., keys, :], kept)
    return after


def _linearly(
    piece: _Piece, upstream: Upstream, after: Tensor | None, to: Targets,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The linear order, and the causal form in chunks: forwards for dq, backwards for the rest."""
    causal, (dq, dk, dv) = piece.causal, to
    sums, R = piece.before, after
    if R is None:
        shape = (*sums.k_sum.shape, sums.kv.shape[-1] + 1)
        R = sums.kv.new_zeros(shape)

    S = None
    if not causal:
        sums = piece.added(sums, slice(0, piece.n_k))
        S = _joined(sums, dtype)
    for rows in _blocks(0, piece.n_q, piece.size):
        x, u = piece.queries(rows, dtype), upstream(rows, dtype)
        if causal:
            S = _joined(sums, dtype) if piece.seen or rows.start else None
        dx = x.new_zeros((1, 1))
        if S is not None:
            dx, _ = _through(piece, x, u, S)
        for keys in piece.pairs(rows, True):
            k, v, kept = piece.keys(keys, dtype)
            left, pull = _pullback(piece.prepare, x)
            right = piece.prepare(k)
            _, dt = _pair(piece, rows, keys, left, right, v, kept, u)
            dx = dx + pull(dt @ finite_part(right))
        dq[..., rows, :] = dx
        if causal and rows.stop < piece.n_q:
            sums = piece.added(sums, rows)
        if not causal:
            R = _gathered(piece, R, x, u)
    for keys in reversed(list(_blocks(0, piece.n_k, piece.size))):
        k, v, kept = piece.keys(keys, dtype)
        dx, dvalues = _through(piece, k, _with_ones(v), R.to(dtype))
        if causal:
            x, u = piece.queries(keys, dtype), upstream(keys, dtype)
            left = piece.prepare(x)
            right, pull = _pullback(piece.prepare, k)
            scores, dt = _pair(piece, keys, keys, left, right, v, kept, u)
            dx = dx + pull((dt.mT @ left).sum_to_size(right.shape))
            dvalues = dvalues + (scores.mT @ u[..., :-1]).sum_to_size(dvalues.shape)
            if keys.start or after is not None:
                R = _gathered(piece, R, x, u)
        _put(dk, keys, dx, kept)
        _put(dv, keys, dvalues, kept)
    return R


def _through(piece: _Piece, x: Tensor, w: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """dx from dphi(x) = w S^T, and phi(x) S but for S's last column."""
    slopes, values = [], []
    for part, by in zip(x.split(FEATURES, -2), w.split(FEATURES, -2), strict=True):
        phi, pull = _pullback(piece.project, part)
        values.append(phi @ S[..., :-1])
        del phi
        slopes.append(pull(by @ S.mT))
    return torch.cat(slopes, -2), torch.cat(values, -2)


def _gathered(piece: _Piece, R: Tensor, x: Tensor, u: Tensor) -> Tensor:
    """R with phi(x)^T u."""
    for part, by in zip(x.split(FEATURES, -2), u.split(FEATURES, -2), strict=True):
        R = R + (piece.project(part).mT @ by).sum_to_size(R.shape)
    return R


def _pair(
    piece: _Piece, rows: slice, keys: slice, left: Tensor, right: Tensor, v: Tensor,
    kept: Tensor | None, u: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """kappa(t) of a block of pairs, and the gradient of t."""
    scores, pull = _pullback(piece.kappa, left @ right.mT)
    dt = pull(u @ _with_ones(v).mT)
    visible = piece.visible(rows, keys, kept)
    if visible is None:
        return scores, dt
    return torch.where(visible, scores, 0.0), torch.where(visible, dt, 0.0)


def _pullback(
    f: Callable[[Tensor], Tensor], x: Tensor
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """f(x), and what takes a gradient of it to one of x."""
    with _direct.recording():
        x = x.detach().requires_grad_()
        y = f(x)

    def pull(grad: Tensor) -> Tensor:
        return torch.autograd.grad(y, x, grad)[0]

    return y.detach(), pull


def _with_ones(v: Tensor) -> Tensor:
    return torch.cat([v, v.new_ones((*v.shape[:-1], 1))], -1)


def _joined(sums: Sums, dtype: torch.dtype) -> Tensor:
    return torch.cat([sums.kv, sums.k_sum.unsqueeze(-1)], -1).to(dtype)


def _add(to: Tensor, x: Tensor) -> None:
    to += x.sum_to_size(to.shape)


def _put(to: Tensor, rows: slice, x: Tensor, kept: Tensor | None) -> None:
    """A gradient of keys or values; 0 where masked, whatever stands there."""
    to[..., rows, :] = x if kept is None else torch.where(kept.unsqueeze(-1), x, 0.0)
