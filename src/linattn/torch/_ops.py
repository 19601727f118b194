"""The operators `torch.ops.linattn.*`: what torch differentiates, compiles and exports.

Those of attention are functional with a fixed number of outputs, but for `absorb_` and `step_`,
which declare what they change. On a CPU the compiled core computes, on other devices, and where the
core declines, the composite. Arguments have been checked by `_check`. `directions` are what a
random map draws.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _check, backends
from ..feature_maps import EXPONENTIAL, get
from ..feature_maps._random import directions as _directions
from . import _arguments, _composite, _direct
from ._composite import Sums

__all__ = [
    "absorb_",
    "absorb_in_torch",
    "attend",
    "attend_backward",
    "backward_cpu",
    "drawn",
    "features",
    "gradients",
    "held_by",
    "keep",
    "lead_of",
    "library",
    "step_",
    "step_in_torch",
]

library = torch.library.Library("linattn", "DEF")  # kept: its end would remove the operators

_CALL = (
    "str feature_map, float eps, bool causal, Tensor? key_mask, Tensor? cu_seqlens, "
    "bool enable_gqa, bool normalize"
)
library.define(
    f"attend(Tensor q, Tensor k, Tensor v, {_CALL}, Tensor? kv, Tensor? k_sum, Tensor? log_scale, "
    "bool return_state, str order) -> (Tensor out, Tensor kv, Tensor k_sum, Tensor log_scale)"
)
library.define(
    "attend_backward(Tensor grad_out, Tensor? grad_kv, Tensor? grad_k_sum, Tensor q, Tensor k, "
    f"Tensor v, Tensor out, {_CALL}, Tensor? kv, Tensor? k_sum, Tensor? log_scale, "
    "Tensor? after_kv, Tensor? after_k_sum, Tensor? after_log_scale) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dkv, Tensor dk_sum)"
)
library.define(
    "absorb_(Tensor(a!) kv, Tensor(b!) k_sum, Tensor(c!)? log_scale, Tensor k, Tensor v, "
    "str feature_map, Tensor? key_mask) -> ()"
)
library.define(
    "step_(Tensor(a!) kv, Tensor(b!) k_sum, Tensor(c!)? log_scale, Tensor q, Tensor k, Tensor v, "
    "str feature_map, float eps, bool enable_gqa, bool normalize) -> Tensor"
)
library.define(
    "directions(SymInt seed, SymInt count, SymInt d, bool orthogonal, *, ScalarType dtype, "
    "Device device) -> Tensor"
)

library.define("features(Tensor x, str feature_map, bool queries) -> Tensor")
library.define("features_backward(Tensor grad, Tensor x, str feature_map, bool queries) -> Tensor")

attend = torch.ops.linattn.attend.default
attend_backward = torch.ops.linattn.attend_backward.default
absorb_ = torch.ops.linattn.absorb_.default
step_ = torch.ops.linattn.step_.default
directions = torch.ops.linattn.directions.default
features = torch.ops.linattn.features.default
features_backward = torch.ops.linattn.features_backward.default


def _sums(kv: Tensor | None, k_sum: Tensor | None, log_scale: Tensor | None) -> Sums | None:
    return None if kv is None or k_sum is None else Sums(kv, k_sum, log_scale)


# attend


def _attend(
    q: Tensor, k: Tensor, v: Tensor, feature_map: str, eps: float, causal: bool,
    key_mask: Tensor | None, cu_seqlens: Tensor | None, enable_gqa: bool, normalize: bool,
    kv: Tensor | None, k_sum: Tensor | None, log_scale: Tensor | None,
    return_state: bool, order: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    """In torch operations, on any device."""
    out, sums = _composite.attend(
        q, k, v, feature_map, eps, causal, key_mask, cu_seqlens, enable_gqa, normalize,
        _sums(kv, k_sum, log_scale), return_state, in_place=True,
    )  # fmt: skip
    return _four(out, *(sums or (None, None, None)))


def _attend_cpu(*args: Any) -> tuple[Tensor, ...]:
    *call, kv, k_sum, log_scale, return_state, order = args
    state = None if kv is None else (kv, k_sum, log_scale)
    result = _direct.verb("attend", *call, state, return_state, order, None)
    if result is None:
        backends.declined("attend")
        return _attend(*args)
    return _four(*result) if return_state else _four(result, None, None, None)


def _four(out: Tensor, kv: Any, k_sum: Any, log_scale: Any) -> tuple[Tensor, ...]:
    return (
        out,
        out.new_empty(0) if kv is None else kv,
        out.new_empty(0) if k_sum is None else k_sum,
        out.new_empty(0, dtype=torch.int32) if log_scale is None else log_scale,
    )


def held_by(k: Tensor, v: Tensor, kv: Tensor | None, packed: bool) -> tuple[int, ...]:
    """The batch shape of keys, values and a state."""
    if kv is None:
        return _arguments.joint_shape(k.shape[:-2], v.shape[:-2])
    past = kv.shape[1:-2] if packed else kv.shape[:-2]
    return _arguments.joint_shape(k.shape[:-2], v.shape[:-2], past)


def lead_of(q: Tensor, held: tuple[int, ...], enable_gqa: bool) -> tuple[int, ...]:
    """The batch shape of the output."""
    if enable_gqa:
        return (*_arguments.joint_shape(q.shape[:-3], held[:-1]), q.shape[-3])
    return _arguments.joint_shape(q.shape[:-2], held)


def _attend_fake(*args: Any) -> tuple[Tensor, ...]:
    q, k, v, feature_map, _, _, _, cuts, enable_gqa, _, kv, _, _, return_state, _ = args
    held = held_by(k, v, kv, cuts is not None)
    out = q.new_empty((*lead_of(q, held, enable_gqa), q.shape[-2], v.shape[-1]))
    if not return_state:
        return _four(out, None, None, None)
    if cuts is not None:
        held = (cuts.shape[0] - 1, *held)
    dtype = _composite.wide(q.device)
    D = k.shape[-1]
    scale = q.new_empty((*held, D), dtype=torch.int32) if feature_map in EXPONENTIAL else None
    return _four(
        out,
        q.new_empty((*held, D, v.shape[-1]), dtype=dtype),
        q.new_empty((*held, D), dtype=dtype),
        scale,
    )


def _attend_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    out, kv, k_sum, log_scale = output
    if not inputs[13]:  # return_state
        keep(ctx, inputs, out, (None, None, None))
    else:
        keep(ctx, inputs, out, (kv, k_sum, log_scale if inputs[3] in EXPONENTIAL else None))


def keep(ctx: Any, inputs: tuple[Any, ...], out: Tensor, after: Any) -> None:
    """What the gradient will ask for; after: the state after all keys, or three times None."""
    q, k, v, *call, kv, k_sum, log_scale, _, _ = inputs
    ctx.set_materialize_grads(False)
    key_mask, cuts = call[3], call[4]
    ctx.call = (*call[:3], *call[5:])
    ctx.save_for_backward(q, k, v, out, key_mask, cuts, kv, k_sum, log_scale, *after)


def _attend_grad(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    grad_out, grad_kv, grad_k_sum, _ = grads
    dq, dk, dv, dkv, dk_sum = gradients(ctx, grad_out, grad_kv, grad_k_sum, attend_backward)
    return (
        dq, dk, dv, None, None, None, None, None, None, None, dkv, dk_sum, None, None, None
    )  # fmt: skip


def gradients(
    ctx: Any, grad_out: Tensor | None, grad_kv: Tensor | None, grad_k_sum: Tensor | None,
    backward: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Those of q, k, v, kv and k_sum, from what was kept; backward: the operator, or its body."""
    q, k, v, out, key_mask, cuts, kv, k_sum, log_scale, *after = ctx.saved_tensors
    feature_map, eps, causal, enable_gqa, normalize = ctx.call
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    if after[0] is None:  # the empty tensors in the place of a state have gradients where asked
        grad_kv = grad_k_sum = None
    if grad_kv is None and grad_k_sum is not None:
        grad_kv = torch.zeros_like(after[0])
    if grad_k_sum is None and grad_kv is not None:
        grad_k_sum = torch.zeros_like(after[1])
    if grad_kv is not None and grad_k_sum is not None:  # the core takes dense sums alone
        grad_kv, grad_k_sum = grad_kv.contiguous(), grad_k_sum.contiguous()
    # Each element with a gradient of its own; torch adds those of what was expanded.
    held = held_by(k, v, kv, cuts is not None)
    lead = lead_of(q, held, enable_gqa)
    q = q.expand(*lead, *q.shape[-2:])
    k, v = k.expand(*held, *k.shape[-2:]), v.expand(*held, *v.shape[-2:])
    if key_mask is not None and key_mask.ndim > 1:
        key_mask = key_mask.reshape((*(1,) * (k.ndim - 1 - key_mask.ndim), *key_mask.shape))
    if kv is not None:
        if cuts is not None:
            held = (cuts.shape[0] - 1, *held)
        missing = len(held) - (kv.ndim - 2)
        if cuts is not None and missing:
            kv, k_sum, log_scale = (
                None if x is None else x.unflatten(0, (-1, *(1,) * missing))
                for x in (kv, k_sum, log_scale)
            )
        kv = kv.expand(*held, *kv.shape[-2:]).contiguous()
        k_sum = k_sum.expand(*held, k_sum.shape[-1]).contiguous()
        if log_scale is not None:
            log_scale = log_scale.expand(*held, log_scale.shape[-1]).contiguous()
    dq, dk, dv, dkv, dk_sum = backward(
        grad_out, grad_kv, grad_k_sum, q, k, v, out, feature_map, eps, causal, key_mask, cuts,
        enable_gqa, normalize, kv, k_sum, log_scale, *after,
    )  # fmt: skip
    return (dq, dk, dv, None, None) if kv is None else (dq, dk, dv, dkv, dk_sum)


# attend_backward


def _backward(
    grad_out: Tensor, grad_kv: Tensor | None, grad_k_sum: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, feature_map: str, eps: float, causal: bool,
    key_mask: Tensor | None, cu_seqlens: Tensor | None, enable_gqa: bool, normalize: bool,
    kv: Tensor | None, k_sum: Tensor | None, log_scale: Tensor | None,
    after_kv: Tensor | None, after_k_sum: Tensor | None, after_log_scale: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """In torch operations, on any device."""
    return _five(
        q,
        *_composite.backward(
            grad_out, grad_kv, grad_k_sum, q, k, v, out, feature_map, eps, causal, key_mask,
            cu_seqlens, enable_gqa, normalize, _sums(kv, k_sum, log_scale), after_log_scale,
        ),
    )  # fmt: skip


def backward_cpu(*args: Any) -> tuple[Tensor, ...]:
    *call, kv, k_sum, log_scale, after_kv, after_k_sum, after_log_scale = args
    before = None if kv is None else (kv, k_sum, log_scale)
    after = None if after_kv is None else (after_kv, after_k_sum, after_log_scale)
    result = _direct.verb("attend_backward", *call, before, after)
    if result is None:
        backends.declined("attend_backward")
        return _backward(*args)
    return _five(call[3], *result)


def _five(q: Tensor, dq: Tensor, dk: Tensor, dv: Tensor, dkv: Any, dk_sum: Any) -> tuple[Any, ...]:
    return (
        dq,
        dk,
        dv,
        q.new_empty(0) if dkv is None else dkv,
        q.new_empty(0) if dk_sum is None else dk_sum,
    )


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    q, k, v, kv, k_sum = *args[3:6], *args[14:16]
    made: list[Any] = [None if x is None else x.new_empty(x.shape) for x in (q, k, v, kv, k_sum)]
    return _five(q, *made)


_DIFFERENTIABLE = (0, 1, 2, 3, 4, 5, 14, 15)  # grad_out, grad_kv, grad_k_sum, q, k, v, kv, k_sum


def _backward_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    ctx.tensors = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
    ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
    ctx.save_for_backward(*(inputs[i] for i in ctx.tensors))


def _backward_grad(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    """The gradient of a gradient, through the composite, whose every derivative torch knows.

    `out` and the state after all keys are what the composite computes from the other inputs, so
    their part of the derivative is in those.
    """
    args = list(ctx.others)
    for i, x in zip(ctx.tensors, ctx.saved_tensors, strict=True):
        args[i] = x
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        wanted = [i for i in _DIFFERENTIABLE if args[i] is not None]
        for i in wanted:
            x = args[i]
            args[i] = x.view_as(x) if again and x.requires_grad else x.detach().requires_grad_()
        (
            grad_out, grad_kv, grad_k_sum, q, k, v, _, feature_map, eps, causal, key_mask, cuts,
            enable_gqa, normalize, kv, k_sum, log_scale, _, _, units,
        ) = args  # fmt: skip
        has_state = grad_kv is not None
        out, sums = _composite.attend(
            q, k, v, feature_map, eps, causal, key_mask, cuts, enable_gqa, normalize,
            _sums(kv, k_sum, log_scale), has_state, units,
        )  # fmt: skip
        outputs, upstream = [out], [grad_out]
        if has_state and sums is not None:
            outputs, upstream = [*outputs, sums.kv, sums.k_sum], [*upstream, grad_kv, grad_k_sum]
        inputs = [x for x in (q, k, v, kv, k_sum) if x is not None]
        given = [g for g, x in zip(grads, (q, k, v, kv, k_sum), strict=True) if x is not None]
        first = torch.autograd.grad(
            outputs, inputs, upstream, create_graph=True, allow_unused=True, materialize_grads=True
        )
        pairs = [
            (f, g) for f, g in zip(first, given, strict=True) if g is not None and f.requires_grad
        ]
        if not pairs:
            return (None,) * len(args)
        second = torch.autograd.grad(
            [f for f, _ in pairs], [args[i] for i in wanted], [g for _, g in pairs],
            create_graph=again, allow_unused=True,
        )  # fmt: skip
    result: list[Any] = [None] * len(args)
    for i, x in zip(wanted, second, strict=True):
        result[i] = x
    return tuple(result)


# Under vmap: one more batch axis in front, and one call for all


class _Mapped:
    """The arguments of an operator, each with the mapped axis, expanded where it had none."""

    def __init__(self, info: Any, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> None:
        self.size, self.in_dims, self.args = info.batch_size, in_dims, args

    def __call__(self, i: int, rank: int = 0, at: int = 0) -> Tensor | None:
        """Argument i with the axis at `at` and ones behind it, to a rank that was without it."""
        x, axis = self.args[i], self.in_dims[i]
        if x is None:
            return None
        ones = (None,) * (rank - x.ndim + (axis is not None))
        if axis is None:
            x = x.unsqueeze(at).expand(*x.shape[:at], self.size, *x.shape[at:])
        else:
            x = x.movedim(axis, at)
        return x[(slice(None),) * (at + 1) + ones]

    def sums(self, i: int, rank: int = 0, at: int = 0) -> Tensor | None:
        """The same of a state or its gradient, which the core takes dense alone."""
        x = self(i, rank, at)
        return None if x is None else x.contiguous()

    def rank(self, i: int) -> int:
        """Of argument i, as it is without the mapped axis."""
        x = self.args[i]
        return 0 if x is None else x.ndim - (self.in_dims[i] is not None)

    def mask(self, i: int, rank: int) -> Tensor | None:
        """One for all keys (n,), or of k's rank less one."""
        return self.args[i] if self.in_dims[i] is None and self.rank(i) < 2 else self(i, rank)

    def cuts(self, i: int) -> Tensor | None:
        if self.in_dims[i] is not None:
            raise _check.mapped_cuts()
        return self.args[i]


def _attend_vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, ...]:
    mapped = _Mapped(info, in_dims, args)
    cuts = mapped.cuts(7)
    at = 0 if cuts is None else 1  # packed states begin with the axis of sequences
    held = max(mapped.rank(1), mapped.rank(2), mapped.rank(10) - at)
    rank = max(mapped.rank(0), held)
    out, kv, k_sum, log_scale = attend(
        *(mapped(i, rank) for i in range(3)), *args[3:6], mapped.mask(6, rank - 1), cuts,
        *args[8:10], *(mapped.sums(10 + i, rank + at - min(i, 1), at) for i in range(3)),
        *args[13:],
    )  # fmt: skip
    if not args[13]:  # return_state
        return (out, kv, k_sum, log_scale), (0, None, None, None)
    extra = tuple(range(at + 1, at + 1 + rank - held))  # ones that queries alone asked for
    scaled = args[3] in EXPONENTIAL
    kv, k_sum = kv.squeeze(extra), k_sum.squeeze(extra)
    log_scale = log_scale.squeeze(extra) if scaled else log_scale
    return (out, kv, k_sum, log_scale), (0, at, at, at if scaled else None)


def _backward_vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, ...]:
    mapped = _Mapped(info, in_dims, args)
    cuts = mapped.cuts(11)
    at = 0 if cuts is None else 1

    def sums(i: int) -> Tensor | None:
        return mapped.sums(i, at=at)

    five = attend_backward(
        mapped(0), sums(1), sums(2), *map(mapped, range(3, 7)), *args[7:10],
        mapped.mask(10, mapped.rank(4) - 1), cuts, *args[12:14], *map(sums, range(14, 20)),
    )  # fmt: skip
    dims = (at, at) if args[14] is not None else (None, None)
    return five, (0, 0, 0, *dims)


# In place


def absorb_in_torch(
    kv: Tensor, k_sum: Tensor, log_scale: Tensor | None, k: Tensor, v: Tensor,
    feature_map: str, key_mask: Tensor | None,
) -> None:  # fmt: skip
    """In torch operations, on any device."""
    q = k.new_empty((*kv.shape[:-2], 0, k.shape[-1]))
    _, sums = _composite.attend(
        q, k, v, feature_map, 0.0, False, key_mask, None, False, True,
        Sums(kv, k_sum, log_scale), True,
    )  # fmt: skip
    assert sums is not None
    kv.copy_(sums.kv)
    k_sum.copy_(sums.k_sum)
    if log_scale is not None and sums.log_scale is not None:
        log_scale.copy_(sums.log_scale)


def _absorb_cpu(*args: Any) -> None:
    if _direct.verb("absorb", *args) is None:
        backends.declined("absorb")
        absorb_in_torch(*args)


def _absorb_fake(*args: Any) -> None:
    return None


def step_in_torch(
    kv: Tensor, k_sum: Tensor, log_scale: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    feature_map: str, eps: float, enable_gqa: bool, normalize: bool,
) -> Tensor:  # fmt: skip
    """In torch operations, on any device."""
    absorb_in_torch(kv, k_sum, log_scale, k, v, feature_map, None)
    none = (
        k.new_empty((*k.shape[:-2], 0, k.shape[-1])),
        v.new_empty((*v.shape[:-2], 0, v.shape[-1])),
    )
    out, _ = _composite.attend(
        q, *none, feature_map, eps, False, None, None, enable_gqa, normalize,
        Sums(kv, k_sum, log_scale), False,
    )  # fmt: skip
    return out.contiguous()


def _step_cpu(*args: Any) -> Tensor:
    result = _direct.verb("step", *args, None)
    if result is None:
        backends.declined("step")
        return step_in_torch(*args)
    return result


def _step_fake(*args: Any) -> Tensor:
    kv, q, enable_gqa = args[0], args[3], args[8]
    held = tuple(kv.shape[:-2])
    return q.new_empty((*lead_of(q, held, enable_gqa), q.shape[-2], kv.shape[-1]))


# Of feature maps


def drawn(seed: int, count: int, d: int, orthogonal: bool, like: Tensor) -> Tensor:
    """Random directions as columns (d, count), of another tensor's dtype and device.

    NumPy draws them, so that a map is the same for arrays and tensors; torch.compile records that
    they are to be drawn.
    """
    make = directions if torch.compiler.is_compiling() else _columns
    return make(seed, count, d, orthogonal, dtype=like.dtype, device=like.device)


def _columns(
    seed: int, count: int, d: int, orthogonal: bool, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.tensor(_directions(seed, count, d, orthogonal).T, dtype=dtype, device=device)


def _columns_fake(
    seed: int, count: int, d: int, orthogonal: bool, *, dtype: torch.dtype, device: torch.device
) -> Tensor:
    return torch.empty((d, count), dtype=dtype, device=device)


def _features(x: Tensor, feature_map: str, queries: bool) -> Tensor:
    """A map's step before its kernel, for those that torch.compile can't follow."""
    project = get(feature_map).projection("q" if queries else "k")
    assert project is not None
    made: Tensor = project(x)
    return made.contiguous()  # some are made feature by feature


def _features_fake(x: Tensor, feature_map: str, queries: bool) -> Tensor:
    D = get(feature_map).width(x.shape[-1])
    assert D is not None
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty((*x.shape[:-1], D), dtype=wide)


def _features_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *ctx.said = inputs
    ctx.save_for_backward(x)


def _features_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return features_backward(grad, *ctx.saved_tensors, *ctx.said), None, None


def _features_backward(grad: Tensor, x: Tensor, feature_map: str, queries: bool) -> Tensor:
    with _direct.recording():
        x = x.detach().requires_grad_()
        y = _features(x, feature_map, queries)
        return torch.autograd.grad(y, x, grad)[0].contiguous()


def _features_backward_fake(grad: Tensor, x: Tensor, feature_map: str, queries: bool) -> Tensor:
    return x.new_empty(x.shape)


def _register() -> None:
    for name, everywhere, cpu, fake in (
        ("attend", _attend, _attend_cpu, _attend_fake),
        ("attend_backward", _backward, backward_cpu, _backward_fake),
        ("absorb_", absorb_in_torch, _absorb_cpu, _absorb_fake),
        ("step_", step_in_torch, _step_cpu, _step_fake),
    ):
        library.impl(name, everywhere, "CompositeExplicitAutograd")
        library.impl(name, cpu, "CPU")
        torch.library.register_fake(f"linattn::{name}", fake, lib=library)
    library.impl("directions", _columns, "CompositeExplicitAutograd")
    torch.library.register_fake("linattn::directions", _columns_fake, lib=library)
    library.impl("features", _features, "CompositeExplicitAutograd")
    torch.library.register_fake("linattn::features", _features_fake, lib=library)
    library.impl("features_backward", _features_backward, "CompositeExplicitAutograd")
    torch.library.register_fake("linattn::features_backward", _features_backward_fake, lib=library)
    torch.library.register_autograd(
        "linattn::features", _features_grad, setup_context=_features_setup, lib=library
    )
    torch.library.register_autograd(
        "linattn::attend", _attend_grad, setup_context=_attend_setup, lib=library
    )
    torch.library.register_autograd(
        "linattn::attend_backward", _backward_grad, setup_context=_backward_setup, lib=library
    )
    torch.library.register_vmap("linattn::attend", _attend_vmap, lib=library)
    torch.library.register_vmap("linattn::attend_backward", _backward_vmap, lib=library)


_register()
