"""Polynomials of q . k: Taylor expansions of exp, powers, and sketches of powers.

The first two have a closed form, kappa(q . k), that costs d_k a score where the features cost D.
"""

from __future__ import annotations

# `project` is a field of FeatureMap and a method here.
# mypy: disable-error-code="misc"
import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ._base import WRITTEN, Array, Family, Recipe, concatenate, constant, namespace, taken
from ._random import Drawn, scaled, side

__all__ = ["Polynomial", "PolynomialSketch", "Taylor"]


FEW = 64  # rows, for which d calls of NumPy take longer than gathering by index


def powers(
    xp: Any, x: Array, factors: list[float], packed: bool, one: bool = False,
    out: Array | None = None,
) -> Array:  # fmt: skip
    """x, x (x) x, ... up to a degree, each flat and times its factor, side by side: (..., n, D).

    The p-th gives factor^2 (q . k)^p.

    It is made feature by feature, over all rows at once, and turned at the end.

    factors: of the degrees 1, 2, ...; a degree of factor 0 is left out
    packed: equal products of a symmetric power once, times the root of their number
    one: begin with a feature that is 1
    out: where NumPy's are to be
    """
    if hasattr(x, "requires_grad"):
        return _powers_of_tensors(xp, x, factors, packed, one)
    d, rows, degree = x.shape[-1], x.shape[:-1], len(factors)
    widths = [_width(d, p, packed) for p in range(1, degree + 1)]
    if out is None:
        D = one + sum(width for width, factor in zip(widths, factors, strict=True) if factor)
        out = np.empty((*rows[:-1], D, rows[-1]), x.dtype).swapaxes(-1, -2)
    made = out.swapaxes(-1, -2)  # (..., D, n)
    x = x.swapaxes(-1, -2).copy("C")  # (..., d, n)
    made[..., :one, :] = 1
    start, before, times = int(one), x, 1.0  # the power before, times its factor
    for p, (width, factor) in enumerate(zip(widths, factors, strict=True), start=1):
        if factor:
            to = made[..., start : start + width, :]
            start += width
        else:
            factor, to = 1.0, np.empty((*rows[:-1], width, rows[-1]), x.dtype)
        if p == 1:
            np.multiply(x, factor, out=to)
        else:
            _raise(x * (factor / times * (math.sqrt(p) if packed else 1)), before, p, packed, to)
        before, times = to, factor
    return out


def _raise(x: Array, before: Array, p: int, packed: bool, out: Array) -> None:
    """The products of x (..., d, n) with the power before it (..., width, n), into out.

    The root of a number of equal products comes by itself: with x_i standing m times in it, that of
    x_i y is sqrt(p / m) times that of y.
    """
    d = x.shape[-2]
    if not packed:
        shape = (*out.shape[:-2], d, *before.shape[-2:])
        np.multiply(x[..., :, None, :], before[..., None, :, :], out=out.reshape(shape))
        return
    if x.size < FEW * d:
        first, rest = rising(d, p)
        np.take(before, rest, -2, out=out, mode="clip")  # other modes make a copy of out
        np.multiply(out, np.take(x, first, -2), out=out)
    else:
        start = 0
        for i, begin in enumerate(begins(d, p)):
            stop = start + before.shape[-2] - begin
            np.multiply(x[..., i : i + 1, :], before[..., begin:, :], out=out[..., start:stop, :])
            start = stop
    where, m = repeated(d, p)
    out[..., where, :] *= constant(np, m**-0.5, x)[:, None]


def _powers_of_tensors(xp: Any, x: Array, factors: list[float], packed: bool, one: bool) -> Array:
    """By operations that have a gradient.

    A product of two tensors that are gathered by index takes a quarter of the time of the d
    products of x_i with the features that may stand behind it.
    """
    x = x.swapaxes(-1, -2).contiguous()  # (..., d, n)
    d, degree = x.shape[-2], len(factors)
    found = [xp.ones_like(x[..., :1, :])] if one else []
    if factors[0]:
        found.append(x * factors[0] if factors[0] != 1 else x)
    plain = x
    for p in range(2, degree + 1):
        factor = factors[p - 1]
        if not packed:
            last = x * factor if p == degree and factor else x
            outer = plain[..., :, None, :] * last[..., None, :, :]
            plain = outer.reshape((*x.shape[:-2], outer.shape[-3] * d, x.shape[-1]))
            if factor:
                found.append(plain if p == degree else plain * factor)
            continue
        first, rest = rising(d, p)
        plain = taken(xp, x, first) * taken(xp, plain, rest)
        if factor:
            found.append(plain * constant(xp, roots(d, p) * factor, x)[:, None])
    return xp.concatenate(found, -2).swapaxes(-1, -2)


@functools.lru_cache(maxsize=32)
def begins(d: int, p: int) -> tuple[int, ...]:
    """Which of the rising products of p - 1 numbers are the first to begin with x_i or later."""
    width = math.comb(d + p - 2, p - 1)
    return tuple(width - math.comb(d - i + p - 2, p - 1) for i in range(d))


@functools.lru_cache(maxsize=32)
def rising(d: int, p: int) -> tuple[Array, Array]:
    """The products x_i ... x_j of p numbers with rising indices, in order: i, and the rest.

    The rest is one of the products of p - 1 numbers. Those that begin with x_i or later stand
    together at their end.

    Examples
    --------
    >>> [x.tolist() for x in rising(3, 2)]
    [[0, 0, 0, 1, 1, 2], [0, 1, 2, 1, 2, 2]]
    """
    width = math.comb(d + p - 2, p - 1)
    first = np.repeat(np.arange(d), [width - begin for begin in begins(d, p)])
    rest = np.concatenate([np.arange(begin, width) for begin in begins(d, p)])
    for found in (first, rest):
        found.flags.writeable = False
    return first, rest


@functools.lru_cache(maxsize=32)
def roots(d: int, p: int) -> Array:
    """Of how many of the d^p products are equal, for each that is kept."""
    counts = []
    for chosen in itertools.combinations_with_replacement(range(d), p):
        repeats = [len(list(run)) for _, run in itertools.groupby(chosen)]
        counts.append(math.factorial(p) / math.prod(map(math.factorial, repeats)))
    found = np.sqrt(np.array(counts))
    found.flags.writeable = False
    return found


@functools.lru_cache(maxsize=32)
def repeated(d: int, p: int) -> tuple[Array, Array]:
    """Which of the rising products begin with a square, and how often their first number is there.

    Examples
    --------
    >>> [x.tolist() for x in repeated(3, 2)]
    [[0, 3, 5], [2, 2, 2]]
    """
    chosen = itertools.combinations_with_replacement(range(d), p)
    m = np.array([c.count(c[0]) for c in chosen])
    where = np.nonzero(m > 1)[0]
    found = where, m[where]
    for x in found:
        x.flags.writeable = False
    return found


def _passes(d: int, degree: int, packed: bool) -> int:
    """Numbers that `powers` writes for a row.

    Those of a packed square count twice, as measured: they're made in strips, of d numbers at most.
    """
    return sum(_width(d, p, packed) * (1 + (packed and p == 2)) for p in range(1, degree + 1))


def _last(degree: int) -> list[float]:
    """Factors that leave only the power of this degree."""
    return [0.0] * (degree - 1) + [1.0]


def _width(d: int, p: int, packed: bool) -> int:
    """C(d + p - 1, p) or d^p, in operations that torch.compile knows of a size that is a symbol."""
    found = 1
    for i in range(p):
        found = found * (d + i) // (i + 1) if packed else found * d
    return found


def _degree(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: expected an integer >= 1, got {value!r}")


@dataclass(frozen=True, repr=False, eq=False)
class Taylor(Family, label="taylor"):
    r"""The Taylor expansion of softmax's exp(q . k / sqrt(d_k)).

    ::

        phi(x) = (1, y, y (x) y / sqrt(2!), ...)               y = scale x
        phi(q) . phi(k) = 1 + t + t^2 / 2! + ... + t^order / order!     t = scale^2 q . k

    order:
        where it ends; an even order makes every weight positive (the second at least 1/2)
    packed:
        y_i y_j and y_j y_i as one feature, sqrt(2) as large: the same weights from about half the
        features, D = 1 + d_k + d_k (d_k + 1) / 2 rather than 1 + d_k + d_k^2 for order 2
    scale:
        of q and of k; None is d_k^(-1/4)

    It is close to exp where |t| < 1, and grows as a power where exp does by factors.

    Examples
    --------
    >>> import numpy as np
    >>> taylor = Taylor(scale=1.0)
    >>> q, k = np.array([[1.0, 2.0]]), np.array([[0.5, -0.1]])
    >>> (taylor(q) @ taylor(k).T).round(4).item(), 1 + 0.3 + 0.3**2 / 2
    (1.345, 1.345)
    >>> Taylor().width(64), Taylor(packed=False).width(64)
    (2145, 4161)

    Source: Arora et al. 2024, "Simple linear attention language models balance the
    recall-throughput tradeoff" (Based), section 4.1; Zhang et al. 2024, section 4.
    """

    order: int = 2
    packed: bool = True
    scale: float | None = None

    computes = "1 + t + t^2 / 2! + ... + t^order / order!,  t = scale^2 q . k"
    paper = "arXiv 2402.18668"
    closed_form = True

    def __post_init__(self) -> None:
        _degree("order", self.order)

    @property
    def averages(self) -> bool:
        return self.order % 2 == 0

    def width(self, d_k: int) -> int:
        return 1 + sum(_width(d_k, p, self.packed) for p in range(1, self.order + 1))

    def row_operations(self, d_k: int) -> int:
        return WRITTEN * (1 + _passes(d_k, self.order, self.packed))

    def project(self, x: Array, out: Array | None = None) -> Array:
        xp = namespace(x)
        y = scaled(xp, x, self.scale)
        factors = [math.factorial(p) ** -0.5 for p in range(1, self.order + 1)]
        return powers(xp, y, factors, self.packed, one=True, out=out)

    def project_into(self, x: Array, out: Array) -> None:
        self.project(x, out)

    def prepare(self, x: Array) -> Array:
        """The rows whose products `kappa` takes."""
        return scaled(namespace(x), x, self.scale)

    def kappa(self, t: Array) -> Array:
        """phi(q) . phi(k) from the product of prepared rows, number by number."""
        found = t * (1 / self.order) + 1
        for p in range(self.order - 1, 0, -1):  # 1 + t/1 (1 + t/2 (1 + ...))
            found = found * t
            if p > 1:
                found = found * (1 / p)
            found = found + 1
        return found

    def kappa_into(self, t: Array, out: Array) -> None:
        np.multiply(t, 1 / self.order, out=out)
        out += 1
        for p in range(self.order - 1, 0, -1):
            out *= t
            if p > 1:
                out *= 1 / p
            out += 1


@dataclass(frozen=True, repr=False, eq=False)
class Polynomial(Family, label="polynomial"):
    r"""A power of q . k.

    ::

        phi(q) . phi(k) = (scale^2 q . k + offset)^degree

    degree:
        of the power; an even one makes every weight >= 0
    offset:
        >= 0; with it lower powers take part too
    packed:
        equal products of features as one: D = C(d + degree - 1, degree) rather than d^degree,
        where d is d_k, or d_k + 1 with an offset
    scale:
        of q and of k; None is d_k^(-1/4)

    Examples
    --------
    >>> import numpy as np
    >>> cube = Polynomial(3, offset=1.0, scale=1.0)
    >>> q, k = np.array([[1.0, 2.0]]), np.array([[0.5, 0.25]])
    >>> (cube(q) @ cube(k).T).round(6).item(), cube.width(2)
    (8.0, 10)

    Source: Kacham et al. 2023, "PolySketchFormer: Fast Transformers via Sketching Polynomial
    Kernels", section 2.
    """

    degree: int = 2
    offset: float = 0.0
    packed: bool = True
    scale: float | None = None

    computes = "(scale^2 q . k + offset)^degree"
    paper = "arXiv 2310.01655"
    closed_form = True

    def __post_init__(self) -> None:
        _degree("degree", self.degree)
        if not self.offset >= 0:
            raise ValueError(f"offset: expected a number >= 0, got {self.offset!r}")

    @property
    def averages(self) -> bool:
        return self.degree % 2 == 0

    def width(self, d_k: int) -> int:
        return _width(d_k + (self.offset > 0), self.degree, self.packed)

    def row_operations(self, d_k: int) -> int:
        return WRITTEN * _passes(d_k + (self.offset > 0), self.degree, self.packed)

    def project(self, x: Array, out: Array | None = None) -> Array:
        xp = namespace(x)
        y = scaled(xp, x, self.scale)
        if self.offset > 0:
            y = concatenate(xp, [y, xp.ones_like(y[..., :1]) * math.sqrt(self.offset)])
        return powers(xp, y, _last(self.degree), self.packed, out=out)

    def project_into(self, x: Array, out: Array) -> None:
        self.project(x, out)

    def prepare(self, x: Array) -> Array:
        """The rows whose products `kappa` takes."""
        return scaled(namespace(x), x, self.scale)

    def kappa(self, t: Array) -> Array:
        """phi(q) . phi(k) from the product of prepared rows, number by number."""
        base = t + self.offset if self.offset > 0 else t
        found = base
        for bit in bin(self.degree)[3:]:  # the leading one is `base`
            found = found * found
            if bit == "1":
                found = found * base
        return found

    def kappa_into(self, t: Array, out: Array) -> None:
        if self.offset > 0:
            t += self.offset
        out[...] = t
        for bit in bin(self.degree)[3:]:
            out *= out
            if bit == "1":
                out *= t


@dataclass(frozen=True, repr=False, eq=False)
class PolynomialSketch(Drawn, label="polynomial_sketch"):
    r"""An estimate of a power of q . k by far fewer features (TensorSketch).

    ::

        C_p(y)_h = sum of s_p(i) y_i over the i with h_p(i) = h          p = 1 ... degree
        phi(x)   = F (C_1(y) * ... * C_degree(y))                        circular convolution
                 = (F C_1(y)) ... (F C_degree(y))

        E phi(q) . phi(k) = (scale^2 q . k + offset)^degree              y = (scale x, sqrt(offset))

    with hashes h_p: features -> 0 ... m - 1 and signs s_p drawn from the seed. F is the discrete
    Fourier transform, in m real numbers and so weighed that F a . F b = a . b (Parseval): features
    are left in frequencies, where a convolution is a product, as nothing but their products
    matters. Going there is part of the one matrix product with all C_p.

    degree, offset, scale:
        as of `polynomial`
    squared:
        sketch half the degree and square the estimate, which makes every weight >= 0 as
        PolySketchFormer does: phi'(x) = phi(x) (x) phi(x), packed. Its mean is above the power by
        the variance of what is squared.
    features:
        m, the width of the sketch; D is m, or m (m + 1) / 2 where squared

    Without `squared` the estimate is unbiased, but may be negative and a denominator near 0.

    Examples
    --------
    >>> import numpy as np
    >>> q, k = np.random.default_rng(0).standard_normal((2, 1, 16))
    >>> draws = [PolynomialSketch(64, seed, scale=1.0) for seed in range(2000)]
    >>> estimates = [(f(q) @ f(k).T).item() for f in draws]
    >>> error = np.std(estimates) / len(draws) ** 0.5
    >>> bool(abs(np.mean(estimates) - (q @ k.T).item() ** 2) < 3 * error)
    True

    Source: Pham and Pagh 2013, "Fast and Scalable Polynomial Kernels via Explicit Feature Maps";
    squared: Kacham et al. 2023, "PolySketchFormer", section 2.3.
    """

    degree: int = 2
    offset: float = 0.0
    squared: bool = False
    scale: float | None = None

    approximates = "(scale^2 q . k + offset)^degree"
    paper = "arXiv 2310.01655"

    def __post_init__(self) -> None:
        super().__post_init__()
        _degree("degree", self.degree)
        if not self.offset >= 0:
            raise ValueError(f"offset: expected a number >= 0, got {self.offset!r}")
        if self.squared and self.degree % 2:
            raise ValueError(f"degree: expected an even one with squared=True, got {self.degree}")

    @property
    def averages(self) -> bool:
        return self.squared

    def width(self, d_k: int) -> int:
        return _width(self.features, 2, True) if self.squared else self.features

    def row_operations(self, d_k: int) -> int:
        """The product with the sketches."""
        return 2 * d_k * self.count * self.features

    @property
    def count(self) -> int:
        """How many sketches are multiplied."""
        return self.degree // 2 if self.squared else self.degree

    def project(self, x: Array) -> Array:
        xp = namespace(x)
        y = scaled(xp, x, self.scale)
        if self.offset > 0:
            y = concatenate(xp, [y, xp.ones_like(y[..., :1]) * math.sqrt(self.offset)])
        m = self.features
        made = y @ constant(xp, spectra(self.seed, self.count, y.shape[-1], m), y)
        found = made[..., :m]
        for p in range(1, self.count):
            found = _times(xp, found, made[..., p * m : (p + 1) * m])
        return powers(xp, found, _last(2), True) if self.squared else found

    def recipe(self, d_k: int) -> Recipe | None:
        return _sketched(
            self.seed, self.count, d_k, self.features, side(self.scale, d_k), self.offset,
            "squares" if self.squared else "spectra",
        )  # fmt: skip


@functools.lru_cache(maxsize=64)
def count_sketch(seed: int, p: int, d: int, m: int) -> Array:
    """(d, m): a sign in one place of each row; read-only."""
    rng = np.random.default_rng([seed, p, d, m])
    found = np.zeros((d, m))
    found[np.arange(d), rng.integers(m, size=d)] = rng.choice([-1.0, 1.0], size=d)
    found.flags.writeable = False
    return found


@functools.lru_cache(maxsize=64)
def spectra(seed: int, count: int, d: int, m: int) -> Array:
    """(d, count m): F C_p of each unit vector, for p = 0 ... count - 1 side by side; read-only.

    A spectrum of m real numbers is m real numbers: the real parts of the frequencies 0 ... m/2,
    then their imaginary parts, which neither 0 has nor m/2 of an even m. All but those two stand
    for two frequencies; the weights that make up for it, and for F, are put on the first sketch.
    """
    real = m // 2 + 1
    found = []
    for p in range(count):
        spectrum = np.fft.rfft(count_sketch(seed, p, d, m))
        found.append(np.concatenate([spectrum.real, spectrum.imag[:, 1 : m - real + 1]], -1))
    twice = np.full(m, math.sqrt(2 / m))
    twice[[0, real - 1] if m % 2 == 0 else 0] = math.sqrt(1 / m)
    found[0] = found[0] * twice
    made = np.concatenate(found, -1)
    made.flags.writeable = False
    return made


def _times(xp: Any, a: Array, b: Array) -> Array:
    """The products of two spectra, laid out as `spectra` says: (..., m)."""
    m = a.shape[-1]
    real = m // 2 + 1
    both = m - real + 1  # frequencies 1 ... both - 1 are complex
    ar, ai, br, bi = a[..., 1:both], a[..., real:], b[..., 1:both], b[..., real:]
    ends = a[..., :1] * b[..., :1], a[..., both:real] * b[..., both:real]
    return concatenate(xp, [ends[0], ar * br - ai * bi, ends[1], ar * bi + ai * br])


@functools.lru_cache(maxsize=64)
def _sketched(
    seed: int, count: int, d: int, m: int, scale: float, offset: float, finish: str
) -> Recipe:
    found = spectra(seed, count, d + (offset > 0), m)
    bias = found[d] * math.sqrt(offset) if offset > 0 else None
    return Recipe(weight=found[:d] * scale, bias=bias, finish=finish, times=count)
