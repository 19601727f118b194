"""What the tests of tensors share: the definition for them, and its bound."""

from __future__ import annotations

from typing import Any

import cases
import ml_dtypes
import numpy as np
import torch
from torch import Tensor

Array = Any

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def array(x: Tensor) -> Array:
    """The same numbers in an array of the same dtype."""
    x = x.detach().cpu()
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def tensor(x: Array) -> Tensor:
    """The same numbers in a tensor of the same dtype, in memory of its own."""
    x = np.ascontiguousarray(x)
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(x.copy())


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).to(dtype)


def inputs(
    seed: int,
    batch: tuple[int, ...],
    n: int,
    d_k: int,
    d_v: int,
    dtype: torch.dtype = torch.float32,
    grad: bool = False,
) -> tuple[Tensor, ...]:
    made = (normal(3 * seed + i, *batch, n, d, dtype=dtype) for i, d in enumerate((d_k, d_k, d_v)))
    return tuple(x.requires_grad_(grad) for x in made)


def close(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, name: Any = None, eps: Any = None, **options: Any
) -> None:
    """The output is the definition's within law 1's bound."""
    c = options.pop("c", cases.C)
    mask = options.get("key_mask")
    if isinstance(mask, Tensor):
        options["key_mask"] = mask.numpy()
    expected, bound = cases.definition(array(q), array(k), array(v), name, eps, **options)
    cases.close(array(out), expected, bound, c)


def same(a: Tensor, b: Tensor) -> None:
    """The same bits."""
    assert a.dtype == b.dtype
    cases.same_bits(array(a), array(b))


def check_gradients(f: Any, x: Any) -> None:
    """First and second derivatives against differences."""
    assert torch.autograd.gradcheck(f, x)
    # The second derivative in a random direction: element by element it takes minutes.
    torch.manual_seed(0)
    assert torch.autograd.gradgradcheck(f, x, fast_mode=True)
