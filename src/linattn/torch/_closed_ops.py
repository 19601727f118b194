"""The operators of maps with a closed form, for graphs that torch compiles or exports.

Outside of graphs `_closed.attend` is called as it is, and its gradient has derivatives of its own;
in a graph it is one operator, and its gradient another. They know a map by its name, and choose the
order where they run, so that one graph serves all lengths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import feature_maps
from ..plan import closed_order
from . import _closed, _composite, _ops
from ._closed import Options
from ._composite import Sums

__all__: list[str] = []

_OPTIONS = (
    "str feature_map, float eps, bool causal, bool enable_gqa, bool normalize, bool return_state, "
    "str order"
)
_ops.library.define(
    f"closed(Tensor q, Tensor k, Tensor v, {_OPTIONS}, Tensor? key_mask, Tensor? cu_seqlens, "
    "Tensor? kv, Tensor? k_sum) -> (Tensor out, Tensor den, Tensor kv, Tensor k_sum)"
)
_ops.library.define(
    "closed_backward(Tensor grad_out, Tensor? grad_kv, Tensor? grad_k_sum, Tensor q, Tensor k, "
    f"Tensor v, {_OPTIONS}, Tensor? key_mask, Tensor? cu_seqlens, Tensor? kv, Tensor? k_sum, "
    "Tensor out, Tensor den) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dkv, Tensor dk_sum)"
)
_backward_op = torch.ops.linattn.closed_backward.default

_COUNT = 7  # of options


def _options(
    said: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, cuts: Tensor | None, kv: Tensor | None
) -> Options:
    """With the map that is meant by the name, and the order that "auto" means for these sizes."""
    o = Options(feature_maps.get(said[0]), *said[1:])
    d_k = k.shape[-1]
    D = o.found.width(d_k)
    assert D is not None
    groups = q.shape[-3] // _ops.held_by(k, v, kv, cuts is not None)[-1] if o.enable_gqa else 1
    return o._replace(
        order=closed_order(
            q.shape[-2], k.shape[-2], d_k, v.shape[-1], D, o.found.row_operations(d_k), groups,
            o.causal, kv is not None or o.return_state, o.order,
        )
    )  # fmt: skip


def _closed_op(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    said, (key_mask, cuts, kv, k_sum) = rest[:_COUNT], rest[_COUNT:]
    sums = None if kv is None else Sums(kv, k_sum, None)
    options = _options(said, q, k, v, cuts, kv)
    out, den, after = _closed._attended(q, k, v, key_mask, cuts, sums, options, options.normalize)
    return (
        out,
        out.new_empty(0) if den is None else den,
        out.new_empty(0) if after is None else after.kv,
        out.new_empty(0) if after is None else after.k_sum,
    )


def _closed_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    said, (_, cuts, kv, _) = rest[:_COUNT], rest[_COUNT:]
    name, _, _, enable_gqa, normalize, return_state, _ = said
    held = _ops.held_by(k, v, kv, cuts is not None)
    shape = (*_ops.lead_of(q, held, enable_gqa), q.shape[-2])
    out, dtype = q.new_empty((*shape, v.shape[-1])), _composite.wide(q.device)
    den = q.new_empty((*shape, 1), dtype=dtype) if normalize else q.new_empty(0)
    if not return_state:
        return out, den, q.new_empty(0), q.new_empty(0)
    if cuts is not None:
        held = (cuts.shape[0] - 1, *held)
    D = feature_maps.get(name).width(k.shape[-1])
    assert D is not None
    return (
        out,
        den,
        q.new_empty((*held, D, v.shape[-1]), dtype=dtype),
        q.new_empty((*held, D), dtype=dtype),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, *rest = inputs
    ctx.said = tuple(rest[:_COUNT])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *rest[_COUNT:], output[0], output[1])


def _grad(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    grad_out, _, grad_kv, grad_k_sum = grads
    q, k, v, key_mask, cuts, kv, k_sum, out, den = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    if not ctx.said[5]:  # return_state: the empty tensors in its place
        grad_kv = grad_k_sum = None
    dq, dk, dv, dkv, dk_sum = _backward_op(
        grad_out, grad_kv, grad_k_sum, q, k, v, *ctx.said, key_mask, cuts, kv, k_sum, out, den
    )
    past = (None, None) if kv is None else (dkv, dk_sum)
    return (dq, dk, dv, *(None,) * (_COUNT + 2), *past)


def _backward(
    grad_out: Tensor, grad_kv: Tensor | None, grad_k_sum: Tensor | None, q: Tensor, k: Tensor,
    v: Tensor, *rest: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    said, (key_mask, cuts, kv, k_sum, out, den) = rest[:_COUNT], rest[_COUNT:]
    sums = None if kv is None else Sums(kv, k_sum, None)
    options = _options(said, q, k, v, cuts, kv)
    five = _closed._gradients(
        (grad_out, grad_kv, grad_k_sum), q, k, v, key_mask, cuts, sums, options, out,
        den if options.normalize else None,
    )  # fmt: skip
    return tuple(q.new_empty(0) if x is None else x for x in five)


def _backward_fake(*args: Any) -> tuple[Tensor, ...]:
    q, kv, k_sum = args[3], *args[-4:-2]
    own = (*args[3:6], kv, k_sum)
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in own)


for _name, _body, _fake in (
    ("closed", _closed_op, _closed_fake),
    ("closed_backward", _backward, _backward_fake),
):
    _ops.library.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"linattn::{_name}", _fake, lib=_ops.library)
torch.library.register_autograd("linattn::closed", _grad, setup_context=_setup, lib=_ops.library)
