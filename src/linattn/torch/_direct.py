"""The compiled core on tensors: the verbs of `linattn._native`, and when they may be called.

The core reads a tensor's memory and nothing else, so what lies above the memory is looked at here:
a gradient that is wanted, a transform of torch.func, a mode that intercepts, a tensor that is
traced or that stands for its negative. Whoever passes may skip torch's dispatcher, which would take
longer than a step of decoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..backends import native

__all__ = ["calm", "mapped", "plain", "recording", "verb"]

_is_autocast = torch.is_autocast_enabled
_transforms = torch._C._are_functorch_transforms_active
_function_modes = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_traced = torch._C._is_tracing
_compiling = torch.compiler.is_compiling
_is_many = torch._C._functorch.is_legacy_batchedtensor  # is_grads_batched has a vmap of its own
_taught: Any = None  # the extension that knows of torch


def calm() -> bool:
    """Whether nothing in force would see, change or record operations."""
    return not (
        _compiling()
        or _transforms()
        or forward_ad._current_level >= 0
        or _function_modes()
        or _dispatch_modes()
        or _is_traced()
        or _is_autocast("cpu")
    )


def plain(x: Any, grad: bool) -> bool:
    """Whether a tensor is its memory and no more; grad: whether gradients are recorded.

    That the memory is this machine's and has strides is for the core to see, which declines others.
    """
    return type(x) is Tensor and not (grad and x.requires_grad) and not x.is_neg()


@contextmanager
def recording() -> Iterator[None]:
    """Within an operator: what follows has a gradient, also where a mode looks on.

    Below a mode that intercepts operations torch leaves out all that it does before a kernel:
    recording gradients, and carrying out conjugates and zeros that tensors only stand for.
    """
    keys = torch._C.DispatchKey
    with ExitStack() as held:
        for key in (
            keys.AutogradFunctionality, keys.ADInplaceOrView, keys.Conjugate, keys.Negative,
            keys.ZeroTensor,
        ):  # fmt: skip
            held.enter_context(torch._C._SetExcludeDispatchKeyGuard(key, False))
        held.enter_context(torch.enable_grad())
        yield


def mapped(*grads: Tensor | None) -> bool:
    """Whether gradients stand for many: under vmap, or of `grad(..., is_grads_batched=True)`."""
    return _transforms() or any(x is not None and _is_many(x) for x in grads)


def _learn() -> None:
    """Tell the extension in use what a tensor is."""
    global _taught
    extension = native.extension
    if extension is not _taught:
        native.register_torch(torch)
        _taught = extension


def _exact(x: Any) -> Any:
    """A Parameter as a tensor."""
    return x if x is None or type(x) is Tensor else x.detach()


def verb(name: str, *args: Any) -> Any:
    """A verb of the core from within an operator, or None: declined."""
    if native.extension is not _taught:
        _learn()
    return getattr(native, name)(*(_exact(x) if isinstance(x, Tensor) else x for x in args))


_learn()
