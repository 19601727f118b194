"""Deterministic parameter-free projection: products of neighbouring features."""

from __future__ import annotations

# `project` is a field of FeatureMap and a method here.
# mypy: disable-error-code="misc"
import functools
from dataclasses import dataclass

from ._base import Array, Family, Recipe, concatenate, namespace, wide

__all__ = ["Dpfp"]


@dataclass(frozen=True, repr=False, eq=False)
class Dpfp(Family, label="dpfp"):
    r"""Products of a feature with its nu neighbours, of r = (relu(x), relu(-x)).

    ::

        phi(x)_(2 d_k (j - 1) + i) = r_i r_((i - j) mod 2 d_k)      j = 1 ... nu,  D = 2 d_k nu

    nu:
        how many neighbours; capacity grows with D

    Both factors are relu's, so no feature is negative: taking the products of x itself gives a
    signed map, which is not this one. Weights are of degree 2 in q and in k.

    The fast-weight layers of the paper also divide phi by the sum of its features. For q that
    cancels; for k it would weigh keys alike: pass ``lambda x: normalised(dpfp(x))`` for that.

    Examples
    --------
    >>> import numpy as np
    >>> Dpfp()(np.array([[1.0, 2.0]])).tolist(), Dpfp()(np.array([[1.0, -2.0]])).tolist()
    ([[0.0, 2.0, 0.0, 0.0]], [[2.0, 0.0, 0.0, 0.0]])

    Source: Schlag et al. 2021, "Linear Transformers Are Secretly Fast Weight Programmers", section
    5.3 and its code.
    """

    nu: int = 1

    nonnegative = True
    computes = "sum_j sum_i r_i(q) r_i(k) r_(i-j)(q) r_(i-j)(k)"
    paper = "arXiv 2102.11174"

    def __post_init__(self) -> None:
        if not isinstance(self.nu, int) or self.nu < 1:
            raise ValueError(f"nu: expected an integer >= 1, got {self.nu!r}")

    def width(self, d_k: int) -> int:
        return 2 * d_k * self.nu

    def project(self, x: Array) -> Array:
        xp = namespace(x)
        x = wide(xp, x)
        r = concatenate(xp, [xp.clip(x, 0, None), xp.clip(-x, 0, None)])
        return concatenate(xp, [r * xp.roll(r, j, -1) for j in range(1, self.nu + 1)])

    def recipe(self, d_k: int) -> Recipe:
        return _neighbours(self.nu)


@functools.lru_cache(maxsize=64)
def _neighbours(nu: int) -> Recipe:
    return Recipe(finish="neighbours", times=nu)
