"""Draws docs/assets/maps: for each family its features, and its weights beside softmax's.

    python docs/map_pictures.py

Left: some features of x = s u, for one direction u of 16 numbers, over s. Right: phi(q) . phi(k) of
400 pairs of rows, over t = q . k / sqrt(d_k), divided by their mean, with exp(t) as a line divided
likewise: what a map that computes softmax would draw.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from linattn import feature_maps
from linattn.cli._picture import COLOURS, _matplotlib

HERE = Path(__file__).parent / "assets" / "maps"
D_K = 16

PICTURES: dict[str, list[Any]] = {
    "elementwise": ["elu1", "relu", "squared_relu", "exp", "softplus", "sigmoid"],
    "softmax": ["softmax"],
    "favor": ["favor(features=512)", "favor(features=512, kind='hyperbolic')"],
    "rfa": ["rfa(features=512)"],
    "relu_random": ["relu_random(features=512)", "performer_relu(features=512)"],
    "dpfp": ["dpfp(nu=1)", "dpfp(nu=3)"],
    "polynomial": ["taylor(order=2)", "polynomial(degree=2)", "polynomial_sketch(features=256)"],
    "cosformer": [feature_maps.cosformer(400).at([0]), feature_maps.cosformer(400).at([300])],
    "learned": [
        feature_maps.hedgehog(np.eye(D_K)),
        feature_maps.hedgehog(np.eye(D_K), normalise="halves"),
        feature_maps.t2r(np.eye(D_K)),
    ],
}


def draw(name: str, maps: list[Any]) -> None:
    from matplotlib.figure import Figure

    rng = np.random.default_rng(1)
    u = rng.standard_normal(D_K)
    u /= np.abs(u).max()
    s = np.linspace(-3, 3, 301)[:, None]
    q, k = rng.standard_normal((2, 400, D_K)) * 0.8
    t = (q * k).sum(-1) / D_K**0.5
    figure = Figure(figsize=(9.2, 3.4), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, each in enumerate(maps):
        colour = COLOURS[i % len(COLOURS)]
        found = feature_maps.get(each)
        label = found.name
        if found.positional if hasattr(found, "positional") else False:
            label = f"{found.name}, position {found.positions[0]}"  # type: ignore[attr-defined]
            rows = np.stack([found(x[None])[0] for x in s * u])
            at = found.at([0])  # type: ignore[attr-defined]
            a, b = (np.stack([m(x[None])[0] for x in y]) for m, y in ((at, q), (found, k)))
        else:
            rows, a, b = found(s * u), found(q), found(k)
        strong = np.argsort(-np.ptp(rows, axis=0))[:: max(1, rows.shape[1] // 4)][:3]
        for j in strong:
            left.plot(s[:, 0], rows[:, j], color=colour, linewidth=1.3)
        weights = (a * b).sum(-1)
        right.plot(t, weights / weights.mean(), ".", color=colour, markersize=3, label=label)
    line = np.linspace(t.min(), t.max(), 200)
    right.plot(
        line, np.exp(line) / np.exp(t).mean(), color="#000000", linewidth=1.3, label="exp(t)"
    )
    left.set_title("some features of s u, over s", fontsize=10)
    right.set_title("weights over t = q · k / √d, in units of their mean", fontsize=10)
    right.set_ylim(-0.5, 6)
    right.legend(fontsize=8, frameon=False)
    for axes in (left, right):
        axes.grid(color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    left.set_ylim(max(left.get_ylim()[0], -4), min(left.get_ylim()[1], 6))
    figure.savefig(HERE / f"{name}.svg", metadata={"Date": None})


def main() -> None:
    matplotlib = _matplotlib()
    matplotlib.rcParams["svg.hashsalt"] = "linattn"
    HERE.mkdir(exist_ok=True)
    for name, maps in PICTURES.items():
        draw(name, maps)


if __name__ == "__main__":
    main()
