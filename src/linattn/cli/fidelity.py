"""`linattn fidelity`: how close feature maps come to softmax attention, on given arrays."""

from __future__ import annotations

import json
import re
import tempfile
from typing import Annotated, Any

import numpy as np
import typer

import linattn

from . import _files, _measure, _picture, _show

__all__ = ["draw", "draw_points", "fidelity"]

MOST = 1.5  # of the axes


def fidelity(
    files: _files.Given = None,
    feature_map: Annotated[
        list[str] | None,
        typer.Option(
            help="φ, by name, such as 'favor(features=64)'; may be given many times. "
            "Without: a choice of all families."
        ),
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Positions of the random arrays.")] = 256,
    d: Annotated[int, typer.Option("--d", min=1, help="Features of the random arrays.")] = 64,
    causal: Annotated[bool, typer.Option("--causal", help="The causal form.")] = False,
    scale: Annotated[
        float | None, typer.Option(help="Of softmax's scores; without: 1/√d_k.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows a head whose weights are compared.")] = 32,
    measure: Annotated[bool, typer.Option("--measure", help="Time every map too.")] = False,
    plot: Annotated[
        str | None,
        typer.Option(help="Draw error against cost into this file (.png, .svg, .pdf)."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random arrays.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """How close feature maps come to softmax attention on given arrays, and what they cost."""
    if plot is not None:
        plot = _picture.checked(plot)
    with tempfile.TemporaryDirectory(prefix="linattn-") as scratch:
        if files:
            q, k, v = (x.array for x in _files.inputs(files, ("q", "k", "v"), scratch))
        else:
            q, k, v = _measure.arrays([(n, d)] * 3, np.float32, seed)
        found = linattn.fidelity(
            q, k, v, feature_map, causal=causal, scale=scale, rows=rows, measure=measure
        )
    if plot is not None:
        draw(plot, found)
    print(json.dumps(found.json(), indent=2) if as_json else found)
    if plot is not None and not as_json:
        print(f"\nPicture: {plot}")


def curve(name: str) -> str:
    """The curve a map belongs to: its family, whatever the width."""
    kind = re.search(r"kind='(\w+)'", name)
    return name.partition("(")[0] + (f", {kind[1]}" if kind else "")


def draw(path: str, found: linattn.Fidelity, title: str = "") -> None:
    """Error and total variation against operations, one curve a family."""
    points = [(m.name, m.operations, m.error, m.total_variation) for m in found.maps]
    heads = _show.counted(found.heads, "head")
    default = f"Against softmax attention: {heads}, n = {found.n_k}, d = {found.d_k}"
    draw_points(path, points, title or default)


def draw_points(path: str, points: list[tuple[str, int, float, float]], title: str) -> None:
    """The picture of names, operations, errors and total variations.

    An error of more than 1.5 says that weights have lost their sense: such points are left out.
    """
    curves: dict[str, list[tuple[str, int, float, float]]] = {}
    for point in points:
        curves.setdefault(curve(point[0]), []).append(point)
    left_out = 0

    def lines(index: int) -> list[_picture.Line]:
        nonlocal left_out
        made = []
        for style, (name, of_family) in enumerate(curves.items()):
            inside = [p for p in of_family if p[index] <= MOST]  # type: ignore[operator]
            left_out += len(of_family) - len(inside)
            x: Any = [p[1] / 1e6 for p in inside]
            made.append(_picture.Line(name, x, [float(p[index]) for p in inside], style))
        return made

    panels = [
        _picture.Panel("output", "relative error", lines(2)),
        _picture.Panel("attention weights", "total variation", lines(3)),
    ]
    if left_out:
        title += f"; {left_out} points above {MOST:g} left out"
    _picture.draw(path, title, panels, "operations a head, millions (logarithmic)")
