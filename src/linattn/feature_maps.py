"""Feature maps: the row-wise functions phi of linear attention.

::

    phi: R^d_k -> R^D,    applied to every row of q and k

A map here is two steps: an optional `project` (anything row by row, such as a matrix product),
then an elementwise `kernel` out of the seven named below, which the backends apply block by
block, so that phi(Q) and phi(K) never reach memory. A map without `project` is wholly fused; a
plain callable is all `project`, with the identity as its kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import fronts

__all__ = [
    "FeatureMap",
    "elu1",
    "exp",
    "get",
    "identity",
    "names",
    "relu",
    "sigmoid",
    "softplus",
    "squared_relu",
]

Array = Any

KERNELS = ("elu1", "relu", "squared_relu", "exp", "softplus", "sigmoid", "identity")


@dataclass(frozen=True)
class FeatureMap:
    """A row-wise map ``phi(x) = kernel(project(x))`` and what is known of it.

    name:
        what it is called in arguments, messages and saved states
    kernel:
        the elementwise last step, one of the fused names
    project:
        the step before it, on whole arrays ``(..., n, d_k) -> (..., n, D)``; None: there is none
    nonnegative:
        whether phi(x) >= 0, so that the normalised output is an average of values
    eps:
        what ``eps=None`` means: 1e-6, and 0 where denominators can be honestly tiny

    Calling it gives phi(x), computed in at least float32 and rounded to x's dtype once.

    Examples
    --------
    >>> import numpy as np
    >>> elu1(np.array([-1.0, 0.0, 2.0])).round(6).tolist()
    [0.367879, 1.0, 3.0]
    >>> elu1.width(64), elu1.nonnegative, elu1.eps
    (64, True, 1e-06)
    """

    name: str
    kernel: str
    project: Callable[[Array], Array] | None = None
    nonnegative: bool = True
    eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            raise ValueError(
                f"kernel: expected one of {', '.join(map(repr, KERNELS))}, got {self.kernel!r}"
            )

    @property
    def exponential(self) -> bool:
        """Whether a state of this map carries a power of two for each feature."""
        return self.kernel == "exp"

    def width(self, d_k: int) -> int | None:
        """D for keys of d_k features; None where only calling the map can tell."""
        return d_k if self.project is None else None

    def __call__(self, x: Array) -> Array:
        """phi(x): ``(..., d_k) -> (..., D)``."""
        if self.project is not None:
            x = self.project(x)
        front = fronts.front(x)
        if front is not None:  # its operations carry gradients, and phi'(0) is what ours are
            return front.apply(self.kernel, x)
        xp = namespace(x)
        wide = xp.float64 if x.dtype == xp.float64 else xp.float32
        return cast(elementwise(xp, self.kernel, cast(x, wide)), x.dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        if _BY_NAME.get(self.name) is self:
            return get, (self.name,)
        return FeatureMap, (self.name, self.kernel, self.project, self.nonnegative, self.eps)

    def __repr__(self) -> str:
        return f"<feature map {self.name}>"


def namespace(x: Array) -> Any:
    """The array library x comes from, found without importing any."""
    return sys.modules[type(x).__module__.partition(".")[0]]


def cast(x: Array, dtype: Any) -> Array:
    """x in another dtype; x itself where it has it."""
    if x.dtype == dtype:
        return x
    return x.astype(dtype) if hasattr(x, "astype") else x.to(dtype)


def elementwise(xp: Any, kernel: str, x: Array) -> Array:
    """The fused kernels in array operations, in the precision of x (float32 or float64)."""
    if kernel == "identity":
        return x
    if kernel == "elu1":
        # x + 1 above 0 and 0 + exp(x) below, both exact; never (exp(x) - 1) + 1, which loses every
        # digit of a small phi.
        return xp.clip(x, 0, None) + xp.exp(xp.clip(x, None, 0))
    if kernel == "relu":
        return xp.clip(x, 0, None)
    if kernel == "squared_relu":
        x = xp.clip(x, 0, None)
        return x * x
    if kernel == "exp":
        return xp.exp(x)
    small = xp.exp(-abs(x))  # at most 1
    if kernel == "softplus":
        return xp.clip(x, 0, None) + xp.log1p(small)
    if kernel == "sigmoid":
        return xp.where(x >= 0, 1.0, small) / (1 + small)
    raise ValueError(f"kernel: expected one of {', '.join(map(repr, KERNELS))}, got {kernel!r}")


elu1 = FeatureMap("elu1", "elu1")
"""x + 1 for x >= 0, exp(x) below: the default (Katharopoulos et al. 2020, eq. 7)."""
relu = FeatureMap("relu", "relu")
"""max(x, 0)."""
squared_relu = FeatureMap("squared_relu", "squared_relu")
"""max(x, 0)^2."""
exp = FeatureMap("exp", "exp", eps=0.0)
"""exp(x), with a power of two for each feature beside its sums, so that nothing overflows."""
softplus = FeatureMap("softplus", "softplus")
"""log(1 + exp(x))."""
sigmoid = FeatureMap("sigmoid", "sigmoid")
"""1 / (1 + exp(-x))."""
identity = FeatureMap("identity", "identity", nonnegative=False)
"""x: for arrays that a map was applied to already. Signed."""

_BY_NAME = {m.name: m for m in (elu1, relu, squared_relu, exp, softplus, sigmoid, identity)}


def names() -> list[str]:
    """The names `get` knows.

    Examples
    --------
    >>> names()
    ['elu1', 'relu', 'squared_relu', 'exp', 'softplus', 'sigmoid', 'identity']
    """
    return list(_BY_NAME)


def get(feature_map: str | FeatureMap | Callable[[Array], Array] | None = None) -> FeatureMap:
    """The `FeatureMap` meant by a name, a callable, a `FeatureMap`, or None (`elu1`).

    Raises
    ------
    ValueError
        a name that is not known
    TypeError
        neither of these

    Examples
    --------
    >>> get("relu"), get(None)
    (<feature map relu>, <feature map elu1>)
    >>> get(lambda x: x * x).kernel
    'identity'
    """
    if feature_map is None:
        return elu1
    if isinstance(feature_map, FeatureMap):
        return feature_map
    if isinstance(feature_map, str):
        found = _BY_NAME.get(feature_map)
        if found is None:
            raise ValueError(
                f"feature_map: expected one of {', '.join(map(repr, _BY_NAME))} or a callable, "
                f"got {feature_map!r}"
            )
        return found
    if callable(feature_map):
        name = getattr(feature_map, "__qualname__", type(feature_map).__qualname__)
        return FeatureMap(f"callable {name}", "identity", feature_map, nonnegative=False)
    raise TypeError(
        "feature_map: expected a name, a FeatureMap, a callable or None, "
        f"got {type(feature_map).__name__}"
    )
