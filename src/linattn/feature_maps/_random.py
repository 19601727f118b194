"""Random features: FAVOR of Performers in two variants, RFA, and relu of random projections.

A map draws its directions from its seed alone, once for each d_k, so two calls give the same bits
and a saved state meets the same map again. `redraw` gives a new map; states of two draws don't
merge.
"""

from __future__ import annotations

# `project` is a field of FeatureMap and a method here.
# mypy: disable-error-code="misc"
import functools
import math
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from .. import fronts
from ._base import WRITTEN, Array, Family, Recipe, concatenate, constant, namespace, wide, with_sign

__all__ = ["Favor", "PerformerRelu", "ReluRandom", "Rfa", "directions", "scaled"]

F = TypeVar("F", bound="Drawn")


@functools.lru_cache(maxsize=64)
def directions(seed: int, count: int, d: int, orthogonal: bool) -> Array:
    """(count, d) float64 rows, each N(0, I) by itself; read-only.

    orthogonal:
        rows of a block of d are at right angles to each other: the rows of a random rotation,
        each times the length of an independent normal vector. Rotations are uniform, which the Q
        of a QR factorisation is only after the signs of R's diagonal are moved into it.
    """
    rng = np.random.default_rng([seed, count, d])
    if not orthogonal:
        w = rng.standard_normal((count, d))
    else:
        blocks = []
        for begin in range(0, count, d):
            q, r = np.linalg.qr(rng.standard_normal((d, d)))
            blocks.append((q * np.where(np.diag(r) < 0, -1.0, 1.0)).T[: count - begin])
        lengths = np.linalg.norm(rng.standard_normal((count, d)), axis=-1)
        w = np.concatenate(blocks) * lengths[:, None]
    w.flags.writeable = False
    return w


@functools.lru_cache(maxsize=64)
def along_directions(
    seed: int, count: int, d: int, orthogonal: bool, scale: float = 1.0, **steps: Any
) -> Recipe:
    """scale w . x for directions w, and how it goes on."""
    w = np.ascontiguousarray(directions(seed, count, d, orthogonal).T) * scale
    return Recipe(weight=w, **steps)


def scaled(xp: Any, x: Array, scale: float | None) -> Array:
    """x in at least float32, times the scale: d_k^(-1/4) by default, 1/sqrt(d_k) on both sides."""
    x = wide(xp, x)
    return x * side(scale, x.shape[-1])


def side(scale: float | None, d_k: int) -> float:
    """What rows are multiplied with: a given scale, or d_k^(-1/4)."""
    return d_k**-0.25 if scale is None else scale


@dataclass(frozen=True, repr=False, eq=False)
class Drawn(Family):
    """A family with a number of features and directions drawn from a seed.

    features:
        D, the output width
    seed:
        of the directions
    orthogonal:
        whether blocks of d_k directions are at right angles, which lowers the variance
    """

    features: int = 256
    seed: int = 0
    orthogonal: bool = True

    random = True
    paired = False  # whether a direction makes two features

    def __post_init__(self) -> None:
        for name in ("features", "seed"):
            value = getattr(self, name)
            least = 1 if name == "features" else 0
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}: expected an integer >= {least}, got {value!r}")
        if self.paired and self.features % 2:
            raise ValueError(
                f"features: expected an even number, as each direction makes two, got "
                f"{self.features}"
            )

    def width(self, d_k: int) -> int:
        return self.features

    def row_operations(self, d_k: int) -> int:
        """The product with the directions, and a pass over features that the core doesn't make."""
        product = 2 * d_k * self.count
        return product if self.inside else product + WRITTEN * self.features

    def redraw(self: F, seed: int) -> F:
        """The same map with other directions.

        Examples
        --------
        >>> favor = Favor(8, seed=1)
        >>> favor.redraw(2), favor.redraw(2) == favor, favor.redraw(1) == favor
        (<feature map favor(features=8, seed=2)>, False, True)
        """
        return replace(self, seed=seed)

    @property
    def count(self) -> int:
        """How many directions are drawn."""
        return self.features // 2 if self.paired else self.features

    def drawn(self, xp: Any, like: Array) -> Array:
        """The directions as columns: (d_k, number of them)."""
        drawn = (self.seed, self.count, like.shape[-1], self.orthogonal)
        front = fronts.front(like)
        if front is not None:  # whose compiler can't follow NumPy's draw
            return front.directions(*drawn, like)
        return constant(xp, directions(*drawn).T, like)


@dataclass(frozen=True, repr=False, eq=False)
class Favor(Drawn, label="favor"):
    r"""Positive random features: an unbiased estimate of softmax's exp(q . k / sqrt(d_k)).

    ::

        phi(x) = exp(w . y - |y|^2 / 2) / sqrt(D)              y = scale x        "positive"
        phi(x) = exp(+-w . y - |y|^2 / 2) / sqrt(D)            both signs         "hyperbolic"
        phi(x) = exp(|y|^2 / 2) (sin, cos)(w . y) / sqrt(D/2)                     "trigonometric"

        E phi(q) . phi(k) = exp(scale^2 q . k)                 w ~ N(0, I)

    kind:
        "positive"; "hyperbolic": D/2 directions and their opposites, of less variance for the same
        D; "trigonometric": D/2 directions, signed, of less variance for large weights and of far
        more for small ones, so that denominators may vanish (not fused)
    scale:
        of q and of k; None is d_k^(-1/4)
    features, seed, orthogonal:
        D, and how the directions are drawn

    The exponent goes to the fused kernel as it is, whose power of two for each feature keeps it
    finite. The authors' code subtracts the largest exponent over all keys instead, which looks
    ahead in the causal form, and adds 1e-4 to each feature, which biases the estimate; neither is
    here. It also takes the Q of a QR factorisation as it comes, whose signs are not uniform.

    Relative errors grow as exp(|y_q + y_k|^2): the map is for rows of moderate length.

    Examples
    --------
    >>> import numpy as np
    >>> q, k = np.random.default_rng(0).standard_normal((2, 1, 16)) / 2
    >>> favor = Favor(16384, seed=1)
    >>> estimate, exact = (favor(q) @ favor(k).T).item(), np.exp(q @ k.T / 4).item()
    >>> abs(estimate / exact - 1) < 0.05
    True

    Source: Choromanski et al. 2020, "Rethinking Attention with Performers", lemma 1 and section
    2.4.
    """

    kind: str = "positive"
    scale: float | None = None

    approximates = "exp(scale^2 q . k)"
    paper = "arXiv 2009.14794"

    def __post_init__(self) -> None:
        kinds = ("positive", "hyperbolic", "trigonometric")
        if self.kind not in kinds:
            raise ValueError(f"kind: expected {', '.join(map(repr, kinds))}, got {self.kind!r}")
        super().__post_init__()

    @property
    def kernel(self) -> str:  # type: ignore[override]
        return "signed_exp" if self.kind == "trigonometric" else "exp"

    @property
    def nonnegative(self) -> bool:  # type: ignore[override]
        return self.kind != "trigonometric"

    @property
    def paired(self) -> bool:  # type: ignore[override]
        return self.kind != "positive"

    def project(self, x: Array) -> Array:
        xp = namespace(x)
        y = scaled(xp, x, self.scale)
        along = y @ self.drawn(xp, y)
        half = (y * y).sum(-1)[..., None] / 2
        if self.kind == "trigonometric":
            waves = concatenate(xp, [xp.sin(along), xp.cos(along)])
            # Almost 0 stands for 0, so that phi' there is what log |phi| and its derivative give.
            waves = xp.where(waves == 0, waves + 1e-20, waves)
            size = xp.log(abs(waves)) + (half - math.log(self.features / 2) / 2)
            return with_sign(xp, size, waves < 0)
        if self.paired:
            along = concatenate(xp, [along, -along])
        return along - (half + math.log(self.features) / 2)

    @property
    def inside(self) -> bool:
        return self.kind != "trigonometric"

    def recipe(self, d_k: int) -> Recipe | None:
        if not self.inside:
            return None
        scale = side(self.scale, d_k)
        return along_directions(
            self.seed, self.count, d_k, self.orthogonal, scale, square=scale**2 / 2,
            shift=math.log(self.features) / 2, mirrored=self.paired,
        )  # fmt: skip


@dataclass(frozen=True, repr=False, eq=False)
class Rfa(Drawn, label="rfa"):
    r"""Random Fourier features of rows of length 1: an estimate of a Gaussian kernel.

    ::

        phi(x) = sqrt(2/D) (sin(w . y), cos(w . y))            y = x / (sigma |x|)

        E phi(q) . phi(k) = exp(-|y_q - y_k|^2 / 2)            w ~ N(0, I)
                          = exp((q/|q| . k/|k| - 1) / sigma^2)

    sigma:
        the smaller, the more pointed the weights
    features, seed, orthogonal:
        D, which is even, and how the directions are drawn

    Rows are divided by their length as in the paper, so that the factors exp(|x|^2 / 2) which
    would turn the kernel into softmax's are the same for all rows and cancel. Features are signed,
    and so is an estimate of a weight: with few features a denominator can come near 0. The paper's
    learned sigma for each direction is not here; its other map, arc-cosine features, is
    `relu_random`.

    Examples
    --------
    >>> import numpy as np
    >>> rfa = Rfa(4096)
    >>> x = np.array([[3.0, 0.0], [0.0, 0.1]])
    >>> (rfa(x) @ rfa(x).T).round(1).tolist()           # 1, and exp(-1) = 0.37
    [[1.0, 0.4], [0.4, 1.0]]

    Source: Peng et al. 2021, "Random Feature Attention", section 3.
    """

    sigma: float = 1.0

    approximates = "exp((q/|q| . k/|k| - 1) / sigma^2)"
    paper = "arXiv 2103.02143"
    paired = True

    def __post_init__(self) -> None:
        if not self.sigma > 0:
            raise ValueError(f"sigma: expected a number > 0, got {self.sigma!r}")
        super().__post_init__()

    def project(self, x: Array) -> Array:
        xp = namespace(x)
        x = wide(xp, x)
        # The largest number first, so that no square leaves the range; a row of zeros stays one.
        x = x / positive(xp, xp.amax(abs(x), -1)[..., None])
        y = x / (positive(xp, xp.sqrt((x * x).sum(-1)[..., None])) * self.sigma)
        along = y @ self.drawn(xp, y)
        return concatenate(xp, [xp.sin(along), xp.cos(along)]) * math.sqrt(2 / self.features)

    def recipe(self, d_k: int) -> Recipe:
        return along_directions(
            self.seed, self.count, d_k, self.orthogonal, 1 / self.sigma, unit=True, finish="waves",
            amount=math.sqrt(2 / self.features),
        )  # fmt: skip


def positive(xp: Any, x: Array) -> Array:
    """x, and 1 where it is 0."""
    return xp.where(x == 0, xp.ones_like(x), x)


@dataclass(frozen=True, repr=False, eq=False)
class ReluRandom(Drawn, label="relu_random"):
    r"""relu of random projections: an estimate of the arc-cosine kernel.

    ::

        phi(x) = max(w . x, 0) / sqrt(D)                       w ~ N(0, I)

        E phi(q) . phi(k) = |q| |k| (sin a + (pi - a) cos a) / (2 pi)
                                                               a: the angle between q and k

    Nothing is scaled: lengths are factors of a weight, that of q cancels.

    RFA takes it with rows of length 1 ("RFA-arccos"). Performers' "generalised attention" with
    relu adds a small number to every feature: that map is `performer_relu`.

    Examples
    --------
    >>> import numpy as np
    >>> found = ReluRandom(4096)
    >>> x = np.array([[2.0, 0.0], [0.0, 1.0]])
    >>> (found(x) @ found(x).T).round(1).tolist()       # 2, 2/(2 pi) = 0.32, 1/2
    [[2.0, 0.3], [0.3, 0.5]]

    Source: Cho and Saul 2009, "Kernel Methods for Deep Learning", of order 1; Peng et al. 2021,
    section 3.
    """

    kernel = "relu"
    nonnegative = True
    approximates = "|q| |k| (sin a + (pi - a) cos a) / (2 pi)"
    paper = "arXiv 2103.02143"

    def project(self, x: Array) -> Array:
        xp = namespace(x)
        x = wide(xp, x)
        return x @ self.drawn(xp, x) * self.features**-0.5

    def recipe(self, d_k: int) -> Recipe:
        return along_directions(self.seed, self.features, d_k, self.orthogonal, self.features**-0.5)


@dataclass(frozen=True, repr=False, eq=False)
class PerformerRelu(Drawn, label="performer_relu"):
    r"""Performers' generalised attention with relu: each feature is lifted off 0.

    ::

        phi(x) = max(w . x, 0) + offset                        w ~ N(0, I)

    offset:
        1e-3 in the authors' code. No denominator is 0, and a row without a positive feature gives
        the plain mean of the values, where `relu_random` gives 0.

    There is no factor 1/sqrt(D), as in the authors' code: the offset is in these units.

    Examples
    --------
    >>> import numpy as np
    >>> PerformerRelu(4)(np.zeros((1, 2))).tolist()
    [[0.001, 0.001, 0.001, 0.001]]

    Source: Choromanski et al. 2020, "Rethinking Attention with Performers", section 2.2 and its
    code's generalised attention.
    """

    offset: float = 1e-3

    nonnegative = True
    approximates = "D (arc-cosine kernel + offset (|q| + |k|) / sqrt(2 pi) + offset^2)"
    paper = "arXiv 2009.14794"

    def __post_init__(self) -> None:
        if not self.offset >= 0:
            raise ValueError(f"offset: expected a number >= 0, got {self.offset!r}")
        super().__post_init__()

    def project(self, x: Array) -> Array:
        xp = namespace(x)
        x = wide(xp, x)
        return xp.clip(x @ self.drawn(xp, x), 0, None) + self.offset

    def recipe(self, d_k: int) -> Recipe:
        return along_directions(
            self.seed, self.features, d_k, self.orthogonal, finish="lifted", amount=self.offset
        )
