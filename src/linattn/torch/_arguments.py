"""Tensors as arguments: what `_check` says of shapes, and what torch says of dtypes and devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import _check

__all__ = [
    "FLOATS",
    "constant",
    "cuts",
    "dtype",
    "fit",
    "is_integer",
    "joint_shape",
    "mask",
    "name_of",
    "promoted",
    "readable",
    "rows",
    "shape",
]

FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype(name: str, value: Any) -> torch.dtype:
    """One of the four floating dtypes."""
    if isinstance(value, torch.dtype) and value in FLOATS:
        return value
    raise _unfit(name, value)


def _unfit(name: str, value: Any) -> TypeError:
    if isinstance(value, torch.dtype) and value.is_complex:  # .to() would drop a part and say so
        return _check.unfit_dtype(name, value, f"{name}.real, or torch.view_as_real({name})")
    return _check.unfit_dtype(name, value, f"{name}.to(torch.float32)")


def promoted(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    return a if a == b else torch.promote_types(a, b)


def shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def rows(**given: Any) -> tuple[Tensor, ...]:
    """Floating tensors (..., n, d) of one dtype and on one device, in autocast's where it is on."""
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise _check.unfit(name, x, "a torch.Tensor, as the others are", "torch.as_tensor")
        if x.layout is not torch.strided:
            raise _check.unfit_layout(name, x.layout)
        if x.dtype not in FLOATS:
            raise _unfit(name, x.dtype)
        _check.rows(name, shape(x))
    first = next(iter(given.values()))
    if any(x.device != first.device for x in given.values()):
        raise _check.differing("device", {name: x.device for name, x in given.items()})
    made = tuple(given.values())
    kind = first.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        low = torch.get_autocast_dtype(kind)
        # As for scaled_dot_product_attention: all but float64.
        made = tuple(x if x.dtype == torch.float64 else x.to(low) for x in made)
    if any(x.dtype != made[0].dtype for x in made):
        raise _check.differing("dtype", {n: x.dtype for n, x in zip(given, made, strict=True)})
    return made


def fit(x: Tensor, state: Any) -> None:
    """Rows against a state's dtype and device."""
    if x.device != state.kv.device:
        raise _check.differing("device", {"q": x.device, "state": state.kv.device})
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return
    if x.dtype != state.dtype:
        raise _check.differing("dtype", {"q": x.dtype, "state": state.dtype})


def mask(value: Any, k: Tensor) -> Tensor | None:
    """A boolean tensor on k's device, (n_k,) or k's shape less its last axis with ones allowed."""
    if value is None:
        return None
    if not isinstance(value, Tensor):
        raise _check.unfit("key_mask", value, "a boolean torch.Tensor", "torch.as_tensor")
    if value.dtype != torch.bool:
        raise _check.unfit_mask(value.dtype, value.is_floating_point(), "key_mask.bool()")
    _check.mask_shape(shape(value), shape(k))
    if value.device != k.device:
        raise _check.differing("device", {"k": k.device, "key_mask": value.device})
    return value


def cuts(value: Any, n: int) -> Tensor | None:
    """Integers [0, ..., n], none less than the one before, in int64."""
    if value is None:
        return None
    if not isinstance(value, Tensor):
        return torch.from_numpy(_check.cu_seqlens(value, n))
    _check.cut_axes(name_of(value.dtype), is_integer(value.dtype), shape(value), n)
    if readable(value):
        if torch._C._functorch.is_batchedtensor(value):
            raise _check.mapped_cuts()
        # By way of a list, as a transform of torch.func lets no array look into a tensor.
        _check.cu_seqlens(np.array(value.tolist(), np.int64), n)
    return value.to(torch.int64)


def constant(values: Any, like: Tensor) -> Tensor:
    """Numbers of a tensor, an array or a list, of another tensor's dtype and on its device."""
    if isinstance(values, Tensor):
        return values.to(device=like.device, dtype=like.dtype)
    # A copy, as torch warns of arrays that can't be written; one that is traced is a tensor.
    make = torch.as_tensor if torch.compiler.is_compiling() else torch.tensor
    return make(values, dtype=like.dtype, device=like.device)


def is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def readable(x: Tensor) -> bool:
    """Whether it holds numbers that may be looked at: while torch traces it doesn't."""
    return (
        not torch.compiler.is_compiling()
        and type(x) in (Tensor, torch.nn.Parameter)
        and x.device.type != "meta"
    )


def joint_shape(first: Any, *others: Any) -> tuple[int, ...]:
    """What shapes broadcast to. torch.broadcast_shapes takes 20 microseconds, equal ones or not."""
    if all(other == first for other in others):
        return tuple(first)
    return tuple(torch.broadcast_shapes(first, *others))
