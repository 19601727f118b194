"""The roads of a call that doesn't go straight to the core, and what they share.

- eager: gradients without torch's dispatcher, see `_eager`
- operator: `torch.ops.linattn.attend`, which torch differentiates, compiles and exports
- composite: torch operations, for the transforms of torch.func and forward-mode derivatives

A map with a closed form has one of its own, see `_closed`, and is expanded for these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _check
from ..feature_maps import EXPONENTIAL, FeatureMap, polynomial_sketch
from . import _arguments, _composite, _direct, _eager, _ops
from ._composite import Sums

__all__ = ["attend", "expanded", "into", "mapped", "transformed"]

_UNTRACED = (polynomial_sketch,)  # NumPy makes its constants, what torch.compile can't follow


def attend(
    q: Tensor, k: Tensor, v: Tensor, kernel: str, eps: float, causal: bool, mask: Tensor | None,
    cuts: Tensor | None, enable_gqa: bool, normalize: bool, sums: Sums | None,
    return_state: bool, order: str,
) -> tuple[Tensor, Sums | None]:  # fmt: skip
    """The operator, or the composite where torch can't differentiate an operator."""
    if transformed():
        return _composite.attend(
            q, k, v, kernel, eps, causal, mask, cuts, enable_gqa, normalize, sums, return_state
        )
    given = (q, k, v, *(() if sums is None else sums[:2]))
    if (
        torch.is_grad_enabled()
        and _direct.calm()
        and any(x.requires_grad for x in given)
        and all(_direct.plain(x, False) for x in given)
    ):
        made = _eager.attend(
            q, k, v, kernel, eps, causal, mask, cuts, enable_gqa, normalize, sums, return_state,
            order,
        )  # fmt: skip
        if made is not None:
            return (made[0], Sums(*made[1:])) if return_state else (made, None)
    kv, k_sum, log_scale = sums or (None, None, None)
    out, *after = _ops.attend(
        q, k, v, kernel, eps, causal, mask, cuts, enable_gqa, normalize, kv, k_sum, log_scale,
        return_state, order,
    )  # fmt: skip
    if not return_state:
        return out, None
    return out, Sums(after[0], after[1], after[2] if kernel in EXPONENTIAL else None)


def expanded(
    found: FeatureMap, q: Tensor, k: Tensor, v: Tensor, eps: float, causal: bool,
    mask: Tensor | None, cuts: Tensor | None, enable_gqa: bool, normalize: bool,
    sums: Sums | None, return_state: bool, order: str,
) -> tuple[Tensor, Sums | None]:  # fmt: skip
    """`attend` with what of the map is no kernel applied to all of q and k before."""
    k, v = mapped(found, "k", k, v, None if sums is None else sums.kv.shape[-2])
    q, v = mapped(found, "q", q, v, k.shape[-1])
    if found.project is not None:  # a map may round less, or more, than what it is given
        wide = _arguments.promoted(_arguments.promoted(q.dtype, k.dtype), v.dtype)
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
    return attend(
        q, k, v, found.kernel, eps, causal, mask, cuts, enable_gqa, normalize, sums,
        return_state, order,
    )  # fmt: skip


def transformed() -> bool:
    """Whether a transform of torch.func or a forward-mode derivative is in force."""
    return torch._C._are_functorch_transforms_active() or (forward_ad._current_level >= 0)


def mapped(
    found: FeatureMap, name: str, x: Tensor, v: Tensor, D: int | None
) -> tuple[Tensor, Tensor]:
    """What of the map is no kernel, applied."""
    project = found.projection(name)
    if project is None:
        if D is not None:
            _check.width(tuple(x.shape), D)
        return x, v
    if torch.compiler.is_compiling() and (found.closed_form or isinstance(found, _UNTRACED)):
        made = _ops.features(x, found.name, name == "q")
    else:
        made = project(x)
    if not isinstance(made, Tensor):
        raise _check.unfit(f"feature_map({name})", made, "a torch.Tensor back", None)
    _arguments.dtype(f"feature_map({name})", made.dtype)
    _check.rows(f"feature_map({name})", tuple(made.shape))
    _check.feature_shape(name, tuple(made.shape), tuple(x.shape), D)
    return made, v


def into(out: Any, answer: Tensor, full: tuple[int, ...]) -> Tensor:
    if not isinstance(out, Tensor):
        raise _check.unfit("out", out, "a torch.Tensor", None)
    if torch.is_grad_enabled() and (answer.requires_grad or out.requires_grad):
        raise _check.no_out_with_gradient()
    _check.out_matches(
        (tuple(out.shape), out.dtype, out.device), (full, answer.dtype, answer.device), "torch"
    )
    return out.copy_(answer)
