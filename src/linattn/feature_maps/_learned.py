"""Maps with weights that are learned: Hedgehog, T2R, and a projection as in Performers.

They take weights as arrays, of any library; training them is `linattn.torch`'s business.
"""

from __future__ import annotations

# `project` is a field of FeatureMap and a method here.
# mypy: disable-error-code="misc"
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from ._base import Array, Family, Recipe, concatenate, constant, namespace, numbers, wide
from ._elementwise import log_softmax
from ._random import scaled, side

__all__ = ["T2R", "Hedgehog", "PerformerLearned"]

L = TypeVar("L", bound="Learned")


class Kept:
    """The recipe of a map with weights, for as long as they are the same numbers.

    Converting weights takes as long as some hundred rows, and a step has one. They may be changed
    in place, so they are compared with a copy, number by number.
    """

    def __init__(self) -> None:
        self._last: tuple[tuple[Any, ...], Recipe] | None = None

    def recipe(
        self, weight: Array, bias: Array | None, scale: float, steps: dict[str, Any]
    ) -> Recipe:
        """scale weight x + bias, and the other steps."""
        made = self._last
        if made is None or not all(map(_same, made[0], (weight, bias, scale, steps))):
            turned = np.ascontiguousarray(numbers(weight).swapaxes(-1, -2) * scale)
            recipe = Recipe(weight=turned, bias=None if bias is None else numbers(bias), **steps)
            self._last = made = (_copied(weight), _copied(bias), scale, steps), recipe
        return made[1]

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, ()


def _same(a: Any, b: Any) -> bool:
    if not hasattr(a, "shape") or not hasattr(b, "shape"):
        return bool(a is b or (type(a) is type(b) and a == b))
    if type(a) is not type(b) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return getattr(a, "device", None) == getattr(b, "device", None) and bool((a == b).all())


def _copied(values: Array | None) -> Array | None:
    if values is None:
        return None
    return values.detach().clone() if hasattr(values, "requires_grad") else values.copy()


@dataclass(frozen=True, repr=False, eq=False)
class Learned(Family):
    """A family with a linear layer: x -> W x + b.

    weight:
        W, (features, d_k), or (heads, features, d_k) for heads of their own, on the third axis
        from the end of q and k
    bias:
        b, (features,) or (heads, features); None: there is none
    query_weight, query_bias:
        W and b of queries, where they have their own: as many features, and with grouped heads as
        many heads as there are of queries; None: those of keys serve both
    """

    weight: Any = None
    bias: Any = None
    query_weight: Any = field(default=None, kw_only=True)
    query_bias: Any = field(default=None, kw_only=True)
    _kept: Kept = field(default_factory=lambda: Kept(), init=False, compare=False)
    _kept_of_queries: Kept = field(default_factory=lambda: Kept(), init=False, compare=False)

    learned = True

    def __post_init__(self) -> None:
        shape = _checked("", self.weight, self.bias)
        if self.query_weight is None:
            if self.query_bias is not None:
                raise ValueError(
                    "query_bias: expected None without query_weight; pass that too, or leave bias "
                    "to serve queries and keys"
                )
            return
        own = _checked("query_", self.query_weight, self.query_bias)
        if own[-2:] != shape[-2:]:
            raise ValueError(
                f"query_weight: expected {shape[-2:]} on its last axes as weight has, got {own}"
            )

    @property
    def project_queries(self) -> Callable[[Array], Array] | None:  # type: ignore[override]
        return None if self.query_weight is None else self.of_queries().project

    def of_queries(self: L) -> L:
        """The map that queries have for themselves."""
        weights = {"weight": self.query_weight, "bias": self.query_bias}
        found = replace(self, **weights, query_weight=None, query_bias=None)
        return found.keeping(self._kept_of_queries)

    def keeping(self: L, kept: Kept) -> L:
        """The same map, whose recipes are kept there."""
        object.__setattr__(self, "_kept", kept)
        return self

    def query_recipe(self, d_k: int) -> Recipe | None:
        return (self if self.query_weight is None else self.of_queries()).recipe(d_k)

    def width(self, d_k: int) -> int:
        return int(self.weight.shape[-2])

    def row_operations(self, d_k: int) -> int:
        """Those of W x."""
        return 2 * d_k * int(self.weight.shape[-2])

    def layer(self, xp: Any, x: Array) -> Array:
        """W x + b."""
        if x.shape[-1] != self.weight.shape[-1]:
            raise ValueError(
                f"weight: expected {x.shape[-1]} columns as q and k have features, got shape "
                f"{tuple(self.weight.shape)}"
            )
        y = x @ constant(xp, self.weight, x).swapaxes(-1, -2)
        return y if self.bias is None else y + constant(xp, self.bias, x)[..., None, :]

    def fixed(self, scale: float = 1.0, **steps: Any) -> Recipe | None:
        """scale W x + b, and the other steps of a recipe; None where W trains."""
        if len(self.weight.shape) > 3 or any(
            getattr(x, "requires_grad", False) for x in (self.weight, self.bias)
        ):
            return None
        return self._kept.recipe(self.weight, self.bias, scale, steps)


def _checked(which: str, weight: Any, bias: Any) -> tuple[int, ...]:
    """The shape of a weight that fits its bias."""
    shape = getattr(weight, "shape", None)
    if shape is None or len(shape) < 2:
        raise ValueError(
            f"{which}weight: expected an array (features, d_k) or (heads, features, d_k), got "
            f"{type(weight).__name__ if shape is None else tuple(shape)}"
        )
    if bias is not None and tuple(bias.shape) != tuple(shape[:-1]):
        raise ValueError(
            f"{which}bias: expected shape {tuple(shape[:-1])} as {which}weight has rows, got "
            f"{tuple(bias.shape)}"
        )
    return tuple(shape)


@dataclass(frozen=True, repr=False, eq=False)
class Hedgehog(Learned, label="hedgehog"):
    r"""exp of a learned layer and of its opposite.

    ::

        z = W x + b                                            D = 2 features

        phi(x) = (exp(z), exp(-z))                             normalise=None
        phi(x) = (softmax(z), softmax(-z))                     normalise="halves"
        phi(x) = softmax(z, -z)                                normalise="joint"

    weight, bias:
        W: (features, d_k), the identity at the start of training, and b
    query_weight, query_bias:
        those of queries, where they have their own, as in the authors' code; None: the same
    normalise:
        the paper writes the first. Code in circulation has the other two, which differ from it and
        from each other: the authors' later code normalises each half, other implementations both
        together (with 2 z for z). They weigh keys differently, so weights trained for one don't
        serve another.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.log(np.array([[2.0, 3.0]]))
    >>> Hedgehog(np.eye(2))(x).round(3).tolist()
    [[2.0, 3.0, 0.5, 0.333]]
    >>> Hedgehog(np.eye(2), normalise="halves")(x).round(3).tolist()
    [[0.4, 0.6, 0.6, 0.4]]

    Source: Zhang et al. 2024, "The Hedgehog & the Porcupine: Expressive Linear Attentions with
    Softmax Mimicry", section 4.2.
    """

    normalise: str | None = None

    kernel = "exp"
    nonnegative = True
    computes = "2 sum_f cosh(z_f(q) + z_f(k)), where nothing is normalised"
    paper = "arXiv 2402.04347"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.normalise not in (None, "halves", "joint"):
            raise ValueError(
                f"normalise: expected None, 'halves' or 'joint', got {self.normalise!r}"
            )

    def width(self, d_k: int) -> int:
        return 2 * super().width(d_k)

    def project(self, x: Array) -> Array:
        xp = namespace(x)
        z = self.layer(xp, wide(xp, x))
        if self.normalise == "halves":
            return concatenate(xp, [log_softmax(z), log_softmax(-z)])
        both = concatenate(xp, [z, -z])
        return both if self.normalise is None else log_softmax(both)

    def recipe(self, d_k: int) -> Recipe | None:
        finish = {None: "none", "halves": "halves", "joint": "softmax"}[self.normalise]
        return self.fixed(mirrored=True, finish=finish)


@dataclass(frozen=True, repr=False, eq=False)
class T2R(Learned, label="t2r"):
    r"""relu of a learned layer.

    ::

        phi(x) = max(W x + b, 0)                               D = features

    Rows whose features are all 0 give 0.

    Examples
    --------
    >>> import numpy as np
    >>> T2R(np.array([[1.0, 1.0]]), np.array([-1.0]))(np.array([[2.0, 3.0], [0.0, 0.5]])).tolist()
    [[4.0], [0.0]]

    Source: Kasai et al. 2021, "Finetuning Pretrained Transformers into RNNs", section 2.2.
    """

    kernel = "relu"
    nonnegative = True
    computes = "max(W q + b, 0) . max(W k + b, 0)"
    paper = "arXiv 2103.13076"

    def project(self, x: Array) -> Array:
        xp = namespace(x)
        return self.layer(xp, wide(xp, x))

    def recipe(self, d_k: int) -> Recipe | None:
        return self.fixed()


@dataclass(frozen=True, repr=False, eq=False)
class PerformerLearned(Learned, label="performer_learned"):
    r"""Positive features as of `favor`, along learned directions.

    ::

        phi(x) = exp(W y + b - |y|^2 / 2) / sqrt(D)            y = scale x,  D = features

    With W drawn from N(0, I) and no b it is `favor`, which is where training starts.

    scale:
        of q and of k; None is d_k^(-1/4)

    Examples
    --------
    >>> import numpy as np
    >>> found = PerformerLearned(np.array([[1.0, 0.0]]), scale=1.0)
    >>> found(np.array([[2.0, 0.0]])).tolist()                 # exp(2 - 2)
    [[1.0]]

    Source: Choromanski et al. 2020, "Rethinking Attention with Performers", with W a parameter.
    """

    scale: float | None = None

    kernel = "exp"
    nonnegative = True
    computes = "sum_f exp(w_f . (q + k) + 2 b_f - (|q|^2 + |k|^2) / 2) / D, scaled"
    paper = "arXiv 2009.14794"

    def project(self, x: Array) -> Array:
        xp = namespace(x)
        y = scaled(xp, x, self.scale)
        along = self.layer(xp, y)
        return along - ((y * y).sum(-1)[..., None] + math.log(along.shape[-1])) / 2

    def recipe(self, d_k: int) -> Recipe | None:
        scale = side(self.scale, d_k)
        return self.fixed(scale, square=scale**2 / 2, shift=math.log(self.weight.shape[-2]) / 2)
