"""Feature maps with weights to train, as modules: the families of `linattn.feature_maps`."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import feature_maps
from ..feature_maps import Family, FeatureMap, Recipe
from ..feature_maps._learned import Kept

__all__ = ["Layer", "hedgehog", "performer_learned", "t2r"]


class Layer(nn.Module):
    """The step before the kernel of a map, with its weight and bias as parameters.

    family:
        a class of `linattn.feature_maps` that takes `weight` and `bias`
    weight, bias:
        their values at the start
    separate:
        queries have a `query_weight` and a `query_bias` of their own, with these values too
    """

    def __init__(
        self,
        family: type[Family],
        weight: Tensor,
        bias: Tensor | None,
        separate: bool = False,
        **given: object,
    ) -> None:
        super().__init__()
        self.family, self.given = family, given
        self._kept, self._kept_of_queries = Kept(), Kept()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.query_weight = nn.Parameter(weight.clone()) if separate else None
        self.query_bias = nn.Parameter(bias.clone()) if separate and bias is not None else None

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., n, d_k) -> (..., n, D), the argument of the kernel."""
        return self._projected(x, self.weight, self.bias)

    def queries(self, x: Tensor) -> Tensor:
        """The same with what queries have of their own."""
        if self.query_weight is None:
            return self.forward(x)
        return self._projected(x, self.query_weight, self.query_bias)

    def _projected(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        make: Any = self.family  # each family has parameters of its own
        projected: Tensor = make(weight=weight, bias=bias, **self.given).project(x)
        return projected

    def recipe(self, d_k: int) -> Recipe | None:
        """What `forward` does, for the compiled core; None where somebody else looks on."""
        return self._recipe(d_k, self._kept, self.weight, self.bias)

    def query_recipe(self, d_k: int) -> Recipe | None:
        """What `queries` does."""
        if self.query_weight is None:
            return self.recipe(d_k)
        return self._recipe(d_k, self._kept_of_queries, self.query_weight, self.query_bias)

    def _recipe(self, d_k: int, kept: Kept, *given: Tensor | None) -> Recipe | None:
        if torch.is_grad_enabled() or self._forward_hooks or self._forward_pre_hooks:
            return None
        make: Any = self.family
        weight, bias = (None if x is None else x.detach() for x in given)
        found = make(weight=weight, bias=bias, **self.given).keeping(kept).recipe(d_k)
        return cast(Recipe | None, found)

    def extra_repr(self) -> str:
        return f"{self.family.label}, weight={tuple(self.weight.shape)}"


def _map(family: type[Family], layer: Layer) -> FeatureMap:
    sizes = "x".join(map(str, layer.weight.shape))
    eps = 0.0 if family.kernel == "exp" else 1e-6
    queries = None if layer.query_weight is None else layer.queries
    name = f"{family.label}, trained, {sizes}"
    return FeatureMap(name, family.kernel, layer, True, eps, queries)


def hedgehog(
    d_k: int,
    features: int | None = None,
    *,
    heads: int | None = None,
    bias: bool = True,
    normalise: str | None = None,
    separate: bool = False,
) -> FeatureMap:
    """`linattn.feature_maps.hedgehog` with W and b to be trained, W the identity at the start.

    d_k, features:
        of a query or key, and rows of W (None: d_k); D is twice that
    heads:
        None: one W for all heads; or as many of them
    normalise:
        None, "halves" or "joint"
    separate:
        W and b of their own for queries, as in the authors' code; they start as those of keys

    The map goes where a `FeatureMap` does, `LinearAttention` included; its parameters are those of
    ``map.project``, a module.

    Examples
    --------
    >>> found = hedgehog(8)
    >>> from linattn import linear_attention
    >>> q, k, v = torch.randn(3, 2, 10, 8)
    >>> linear_attention(q, k, v, found, causal=True).sum().backward()
    >>> found.project.weight.grad.shape
    torch.Size([8, 8])
    """
    rows = d_k if features is None else features
    weight = torch.eye(rows, d_k).expand(*_lead(heads), rows, d_k).clone()
    family = feature_maps.hedgehog
    return _map(family, Layer(family, weight, _bias(bias, weight), separate, normalise=normalise))


def t2r(
    d_k: int,
    features: int | None = None,
    *,
    heads: int | None = None,
    bias: bool = True,
    separate: bool = False,
) -> FeatureMap:
    """`linattn.feature_maps.t2r` with W and b to be trained, at the start as `nn.Linear` has them.

    Arguments as of `hedgehog`; D is `features`.

    Examples
    --------
    >>> t2r(8, 4, heads=3).project.weight.shape
    torch.Size([3, 4, 8])
    """
    rows = d_k if features is None else features
    weight = torch.empty(*_lead(heads), rows, d_k).uniform_(-1, 1) / math.sqrt(d_k)
    family = feature_maps.t2r
    return _map(family, Layer(family, weight, _bias(bias, weight), separate))


def performer_learned(
    d_k: int,
    features: int | None = None,
    *,
    heads: int | None = None,
    bias: bool = False,
    scale: float | None = None,
    separate: bool = False,
) -> FeatureMap:
    """`linattn.feature_maps.performer_learned` to be trained, random features at the start.

    Arguments as of `hedgehog`; D is `features`, `scale` is of q and of k (None: d_k^(-1/4)).

    Examples
    --------
    >>> performer_learned(8, 32).project.weight.shape
    torch.Size([32, 8])
    """
    rows = d_k if features is None else features
    weight = torch.randn(*_lead(heads), rows, d_k)
    family = feature_maps.performer_learned
    return _map(family, Layer(family, weight, _bias(bias, weight), separate, scale=scale))


def _lead(heads: int | None) -> tuple[int, ...]:
    return () if heads is None else (heads,)


def _bias(wanted: bool, weight: Tensor) -> Tensor | None:
    return weight.new_zeros(weight.shape[:-1]) if wanted else None
