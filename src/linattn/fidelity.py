"""How close a feature map comes to softmax attention, on given queries, keys and values."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from . import _check, feature_maps
from .attention import linear_attention, softmax_attention
from .feature_maps import Family, FeatureMap
from .plan import plan

__all__ = ["Fidelity", "Measured", "fidelity"]

Array = Any
Map = str | FeatureMap | type[Family] | Callable[[Any], Any] | None

_MOST_KEYS = 4096  # weights are measured row by row, as vectors of all keys


@dataclass(frozen=True)
class Measured:
    """One map against softmax attention; means over all heads and the rows that were looked at.

    p: softmax's weights of a row, w: the map's. Both add up to 1; w may be negative.

    name, D, operations, order:
        of the map: features, and by the plan what a head costs in which order
    seconds:
        measured for the whole call; None where it wasn't asked for
    error:
        ``|out - softmax's| / |softmax's|`` over everything (Frobenius)
    cosine:
        between rows of both outputs
    kl:
        ``sum p log(p / w)``, in nats; None if a weight is 0 or negative where p isn't
    total_variation:
        ``sum |p - w| / 2``
    entropy:
        ``-sum w log w`` in nats, of what isn't negative; softmax's is that of the row "softmax"
    largest:
        the largest weight of a row: how spiky they are
    monotone:
        Spearman's rank correlation of w with q . k: 1 where a larger product always weighs more
    negative:
        the share of weights below 0
    """

    name: str
    D: int | None
    operations: int
    order: str
    seconds: float | None
    error: float
    cosine: float
    kl: float | None
    total_variation: float
    entropy: float
    largest: float
    monotone: float
    negative: float


@dataclass(frozen=True)
class Fidelity:
    """What `fidelity` found: `maps`, one `Measured` each, `softmax` itself, and the sizes."""

    n_q: int
    n_k: int
    d_k: int
    d_v: int
    heads: int
    rows: int
    causal: bool
    softmax: Measured
    maps: tuple[Measured, ...]

    def json(self) -> dict[str, Any]:
        """As dicts and lists of plain numbers."""
        return asdict(self)

    def __str__(self) -> str:
        head = (
            "map",
            "D",
            "Mflop",
            "error",
            "cosine",
            "KL",
            "TV",
            "entropy",
            "largest",
            "monotone",
        )
        lines: list[tuple[str, ...]] = [head]
        for m in (self.softmax, *self.maps):
            lines.append(
                (
                    "softmax attention" if m is self.softmax else m.name,
                    "" if m.D is None else f"{m.D:,}",
                    f"{m.operations / 1e6:,.1f}",
                    f"{m.error:.3f}",
                    f"{m.cosine:.3f}",
                    "" if m.kl is None else f"{m.kl:.3f}",
                    f"{m.total_variation:.3f}",
                    f"{m.entropy:.2f}",
                    f"{m.largest:.3f}",
                    f"{m.monotone:.2f}",
                )
            )
        if any(m.seconds is not None for m in self.maps):
            times = ("ms", *(f"{1e3 * (m.seconds or 0):.2f}" for m in (self.softmax, *self.maps)))
            lines = [(*line, t) for line, t in zip(lines, times, strict=True)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        rows = "\n".join(
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )
        what = "causal, " if self.causal else ""
        return (
            f"{self.heads:,} head{'s' * (self.heads > 1)}, n_q {self.n_q:,}, n_k {self.n_k:,}, "
            f"d_k {self.d_k:,}, d_v {self.d_v:,}, {what}weights of {self.rows:,} rows a head\n\n"
            f"{rows}"
        )


def fidelity(
    q: Array,
    k: Array,
    v: Array,
    maps: Iterable[Map] | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    rows: int = 32,
    measure: bool = False,
) -> Fidelity:
    """How close feature maps come to softmax attention on these arrays, and what they cost.

    q: (..., n_q, d_k), k: (..., n_k, d_k), v: (..., n_k, d_v)

    Parameters
    ----------
    maps
        names (``"favor(features=64)"``), `FeatureMap` objects, families or callables; None is
        `default_maps`. Those that depend on position get 0, 1, 2, ...
    scale
        of softmax's scores; None is 1/sqrt(d_k). Maps keep their own.
    causal
        row i sees the keys 0 ... i
    rows
        how many rows of each head, evenly spread, have their weights compared
    measure
        time each map and softmax too, as the best of three calls

    Returns
    -------
    Fidelity

    Raises
    ------
    TypeError, ValueError
        as in `linear_attention`; more than 4,096 keys, whose weights would not fit

    Examples
    --------
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 64, 16))
    >>> found = fidelity(q / 2, k / 2, v, ["elu1", "taylor", "favor(features=1024)"])
    >>> [(m.name, m.D) for m in found.maps]
    [('elu1', 16), ('taylor', 153), ('favor(features=1024)', 1024)]
    >>> found.maps[1].error < found.maps[2].error < found.maps[0].error
    True
    """
    call = _check.attention(q, k, v, causal=causal)
    rows = _check.size("rows", rows, 1)
    if isinstance(maps, str) or callable(maps):
        raise TypeError(f"maps: expected a list of maps, got {maps!r}; pass [{maps!r}]")
    n_q, n_k, d_k, d_v = call.q.shape[-2], call.k.shape[-2], call.k.shape[-1], call.v.shape[-1]
    if not 0 < n_k <= _MOST_KEYS or n_q == 0:
        raise ValueError(
            f"k: expected 1 to {_MOST_KEYS} positions, got {n_k}: weights are compared over all "
            "keys; pass a part of the sequence"
        )
    lead = call.shape[:-2]
    q, k, v = (
        np.broadcast_to(x, (*lead, *x.shape[-2:])).reshape(-1, *x.shape[-2:]).astype(np.float64)
        for x in (call.q, call.k, call.v)
    )
    heads = len(q)
    scale = d_k**-0.5 if scale is None else _check.scale(scale)
    chosen = np.unique(np.linspace(0, n_q - 1, min(rows, n_q)).round().astype(int))
    products = q[:, chosen] @ k.swapaxes(-1, -2)
    sees = np.arange(n_k) <= chosen[:, None] if causal else np.ones((len(chosen), n_k), bool)
    scores = np.where(sees, scale * products, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    exact = softmax_attention(q, k, v, scale=scale, causal=causal)
    ranks = [_ranks(products[:, i][:, sees[i]]) for i in range(len(chosen))]

    def timed(work: Callable[[], object]) -> float | None:
        if not measure:
            return None
        best = math.inf
        for _ in range(3):
            start = time.perf_counter()
            work()
            best = min(best, time.perf_counter() - start)
        return best

    def compare(name: str, D: int | None, cost: tuple[int, str], seconds: float | None,
                out: Array, w: Array) -> Measured:  # fmt: skip
        cosine = (out * exact).sum(-1) / np.maximum(
            np.linalg.norm(out, axis=-1) * np.linalg.norm(exact, axis=-1), 1e-300
        )
        above = np.where(w > 0, w, 1.0)
        kl = None
        if (w[p > 0] > 0).all():
            kl = float((p * (np.log(np.where(p > 0, p, 1)) - np.log(above))).sum(-1).mean())
        monotone = [_correlation(ranks[i], _ranks(w[:, i][:, sees[i]])) for i in range(len(chosen))]
        return Measured(
            name, D, *cost, seconds,
            error=float(np.linalg.norm(out - exact) / np.linalg.norm(exact)),
            cosine=float(cosine.mean()),
            kl=kl,
            total_variation=float(0.5 * np.abs(p - w).sum(-1).mean()),
            entropy=float(-(np.where(w > 0, w, 0) * np.log(above)).sum(-1).mean()),
            largest=float(w.max(-1).mean()),
            monotone=float(np.mean(np.concatenate(monotone))),
            negative=float((w < 0).sum() / (heads * sees.sum())),
        )  # fmt: skip

    given = (call.q, call.k, call.v)
    count = 2 * (n_q * (n_q + 1) // 2 if causal else n_q * n_k) * (d_k + d_v)
    seconds = timed(lambda: softmax_attention(*given, scale=scale, causal=causal))
    softmax = compare("softmax", None, (count, "quadratic"), seconds, exact, p)
    found = []
    for each in default_maps(n_k) if maps is None else maps:
        phi: Any = feature_maps.get(each)
        at = phi.at(range(n_k)) if getattr(phi, "positional", False) else phi
        D = phi.width(d_k)
        if D is None:
            D = int(at(k[:1, :1]).shape[-1])
        price = plan(
            n_q, n_k, d_k, d_v, D=D, causal=causal, closed_form=phi.closed_form,
            row_operations=phi.row_operations(d_k),
        )  # fmt: skip
        run: Callable[..., Any] = lambda q, k, v, at=at: linear_attention(  # noqa: E731
            q, k, v, at, causal=causal
        )
        found.append(
            compare(
                phi.name,
                D,
                (price.cost.operations, price.order),
                timed(lambda run=run: run(*given)),  # type: ignore[misc]
                run(q, k, v),
                _weights(q, k, at, causal, chosen),
            )
        )
    return Fidelity(n_q, n_k, d_k, d_v, heads, len(chosen), causal, softmax, tuple(found))


def default_maps(n: int) -> list[str]:
    """Maps without weights to be learned, some in several widths, for sequences of n."""
    return [
        "elu1", "relu", "exp", "softmax",
        *(f"dpfp(nu={nu})" for nu in (1, 2, 3)),
        *(f"taylor(order={p})" for p in (1, 2, 3)),
        *(f"polynomial(degree={p})" for p in (2, 4)),
        *(f"favor(features={m})" for m in (32, 128, 512, 2048)),
        *(f"favor(features={m}, kind='hyperbolic')" for m in (32, 128, 512, 2048)),
        *(f"rfa(features={m})" for m in (32, 128, 512)),
        *(f"relu_random(features={m})" for m in (32, 128, 512)),
        f"cosformer(length={n})",
    ]  # fmt: skip


def _weights(q: Array, k: Array, phi: FeatureMap, causal: bool, chosen: Array) -> Array:
    """The map's weights, normalised: (heads, chosen rows, n_k). Attention to the unit vectors."""
    found = []
    unit = np.eye(k.shape[-2])
    for one, keys in zip(q, k, strict=True):
        found.append(linear_attention(one, keys, unit, phi, causal=causal)[chosen])
    return np.stack(found)


def _ranks(x: Array) -> Array:
    """Ranks along the last axis, equal numbers sharing theirs."""
    order = np.argsort(x, axis=-1, kind="stable")
    ordered = np.take_along_axis(x, order, -1)
    n = x.shape[-1]
    place = np.broadcast_to(np.arange(n, dtype=np.float64), x.shape)
    new = np.ones(x.shape, bool)
    new[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    first = np.maximum.accumulate(np.where(new, place, 0), axis=-1)
    last_new = np.ones(x.shape, bool)
    last_new[..., :-1] = new[..., 1:]
    last = np.minimum.accumulate(np.where(last_new, place, n)[..., ::-1], axis=-1)[..., ::-1]
    ranks = np.empty(x.shape)
    np.put_along_axis(ranks, order, (first + last) / 2, -1)
    return ranks


def _correlation(a: Array, b: Array) -> Array:
    """Pearson's along the last axis; 1 where there is nothing to order."""
    if a.shape[-1] < 2:
        return np.ones(a.shape[:-1])
    a, b = a - a.mean(-1, keepdims=True), b - b.mean(-1, keepdims=True)
    size = np.sqrt((a * a).sum(-1) * (b * b).sum(-1))
    return np.where(size > 0, (a * b).sum(-1) / np.where(size > 0, size, 1), 0.0)
