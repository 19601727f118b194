"""The maps that are a fused kernel and nothing else, and softmax over the features."""

from __future__ import annotations

# `project` is a field of FeatureMap and a method here.
# mypy: disable-error-code="misc"
from dataclasses import dataclass

from ._base import Array, Family, FeatureMap, Recipe, named, namespace, wide

__all__ = ["Softmax", "elu1", "exp", "identity", "relu", "sigmoid", "softplus", "squared_relu"]

elu1 = named(FeatureMap("elu1", "elu1"))
"""x + 1 for x >= 0, exp(x) below: the default (Katharopoulos et al. 2020, eq. 7)."""
relu = named(FeatureMap("relu", "relu"))
"""max(x, 0)."""
squared_relu = named(FeatureMap("squared_relu", "squared_relu"))
"""max(x, 0)^2."""
exp = named(FeatureMap("exp", "exp", eps=0.0))
"""exp(x), with a power of two for each feature beside its sums, so that nothing overflows."""
softplus = named(FeatureMap("softplus", "softplus"))
"""log(1 + exp(x))."""
sigmoid = named(FeatureMap("sigmoid", "sigmoid"))
"""1 / (1 + exp(-x))."""
identity = named(FeatureMap("identity", "identity", nonnegative=False))
"""x: for arrays that a map was applied to already. Signed."""


@dataclass(frozen=True, repr=False, eq=False)
class Softmax(Family, label="softmax"):
    r"""Softmax over the features of a row.

    ::

        phi(x)_d = exp(x_d) / sum_e exp(x_e)          D = d_k

    Features are positive and add up to 1, so a weight phi(q) . phi(k) is at most 1: the chance
    that two draws, one from each row's distribution, name the same feature.

    Shen et al. take it for queries, and for keys a softmax over *positions*. That one looks at the
    whole sequence, so it has no causal form, and a state could not hold it; a common factor of a
    feature over all keys is all it changes. This map is row by row on both sides.

    Examples
    --------
    >>> import numpy as np
    >>> Softmax()(np.array([[0.0, 0.0], [1000.0, 1000.0 + np.log(3.0)]])).round(3).tolist()
    [[0.5, 0.5], [0.25, 0.75]]

    Source: Shen et al. 2018, "Efficient Attention: Attention with Linear Complexities", section
    3.2; both sides by row in Zhang et al. 2024, "The Hedgehog & the Porcupine".
    """

    kernel = "exp"
    nonnegative = True
    computes = "sum_d softmax(q)_d softmax(k)_d"
    paper = "arXiv 1812.01243"

    def width(self, d_k: int) -> int:
        return d_k

    def project(self, x: Array) -> Array:
        return log_softmax(x)

    def recipe(self, d_k: int) -> Recipe:
        return _OVER_FEATURES


_OVER_FEATURES = Recipe(finish="softmax")


def log_softmax(x: Array) -> Array:
    """x - log sum exp x over the last axis: the exponent of softmax."""
    xp = namespace(x)
    x = wide(xp, x)
    x = x - xp.amax(x, -1)[..., None]
    return x - xp.log(xp.exp(x).sum(-1))[..., None]
