"""Pictures over the logarithm of n, with matplotlib, which is imported where one is drawn."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import _files
from ._failure import brought

__all__ = ["Line", "Panel", "checked", "draw"]

FORMATS = (".png", ".svg", ".pdf")

# Blue, orange, green, vermilion, purple: told apart by the colour-blind too (Okabe and Ito 2008).
COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#D55E00", "#CC79A7", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass
class Line:
    """Points, what they are, which of the colours they have, and a note behind the last one."""

    name: str
    n: Sequence[int]
    values: Sequence[float]
    style: int
    note: str = ""


@dataclass
class Panel:
    title: str
    unit: str  # "seconds" or "bytes", with a logarithmic axis, or what the axis from 0 is called
    lines: Sequence[Line]


def checked(path: str) -> str:
    """The file to draw into; errors before anything was measured."""
    _matplotlib()
    return _files.checked_output(path, "--plot", FORMATS)


def _matplotlib() -> Any:
    package = brought("matplotlib", "'linattn[cli]'", "a picture (--plot)")
    package.use("Agg")
    return package


def draw(path: str, title: str, panels: Sequence[Panel], across: str) -> None:
    """Write the picture, whole or not at all."""
    _matplotlib()
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.2 * len(panels), 5.2), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=12)
    named: dict[str, Any] = {}
    places = list(zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True))
    for axes, panel in places:
        named |= _panel(axes, panel, across)
    figure.legend(
        named.values(),
        named.keys(),
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=10,
    )
    figure.draw_without_rendering()  # now it is known how high everything is
    for axes, panel in places:
        _notes(axes, panel.lines)
    kind = os.path.splitext(path)[1][1:].lower()
    # The same figures give the same bytes: a picture under version control changes with them alone.
    about: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with _files.replacing(path, "--plot") as file, rc_context({"svg.hashsalt": "linattn"}):
        figure.savefig(file, format=kind, metadata=about.get(kind))


def _panel(axes: Any, panel: Panel, across: str) -> dict[str, Any]:
    """Draws it; returns what the legend has to show."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_title(panel.title, fontsize=11)
    axes.set_xscale("log", base=2)
    if panel.unit in ("seconds", "bytes"):
        axes.set_yscale("log", base=2 if panel.unit == "bytes" else 10)
    drawn = {}
    for line in panel.lines:
        if not line.n:
            continue
        (drawn[line.name],) = axes.plot(
            line.n,
            line.values,
            color=COLOURS[line.style % len(COLOURS)],
            marker=MARKERS[(line.style + line.style // len(COLOURS)) % len(MARKERS)],
            markersize=5,
            linewidth=1.8,
        )
    axes.set_xlabel(across)
    axes.xaxis.set_major_locator(LogLocator(base=2, numticks=9))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    if panel.unit == "seconds":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _time(y)))
    elif panel.unit == "bytes":
        axes.yaxis.set_major_locator(LogLocator(base=2, numticks=12))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _files.size_of(y)))
    else:
        axes.set_ylabel(panel.unit)
        axes.set_ylim(bottom=0)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.14)
    axes.grid(which="major", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return drawn


def _notes(axes: Any, lines: Sequence[Line]) -> None:
    """Each note behind the last point of its line, none over another."""
    points = 72 / axes.figure.dpi
    lines = [line for line in lines if line.n and line.note]
    for last in {line.n[-1] for line in lines}:
        here = sorted((line for line in lines if line.n[-1] == last), key=lambda x: x.values[-1])
        heights = [points * axes.transData.transform((last, line.values[-1]))[1] for line in here]
        for line, height, free in zip(here, heights, spread(heights, 12), strict=True):
            axes.annotate(
                line.note,
                (last, line.values[-1]),
                xytext=(7, free - height),
                textcoords="offset points",
                color=COLOURS[line.style % len(COLOURS)],
                fontsize=9,
                va="center",
            )


def spread(heights: Sequence[float], apart: float) -> list[float]:
    """Rising heights, moved so that neighbours are so far apart; those that are stay."""
    groups: list[list[float]] = []  # of those that touch: their middle, their number
    for height in heights:
        groups.append([height, 1])
        while (
            len(groups) > 1
            and groups[-1][0] - groups[-2][0] < apart * (groups[-1][1] + groups[-2][1]) / 2
        ):
            middle, count = groups.pop()
            below, more = groups[-1]
            groups[-1] = [(below * more + middle * count) / (more + count), more + count]
    return [
        middle + apart * (i - (count - 1) / 2)
        for middle, count in groups
        for i in range(int(count))
    ]


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.999 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds / 1e-9:.0f} ns"
