"""The picture of the peers, and what all pictures share; only those who draw need matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMS = {  # what is compared, and the benchmark that has it
    "full": "torch_forward",
    "causal": "torch_causal",
    "full, gradients": "torch_gradients",
    "causal, gradients": "torch_gradients",
    "step": "torch_decode",
}
SIZE = (8, 8192)  # heads and positions that are shown, or the nearest that a peer was timed at


def pyplot() -> Any:
    """Matplotlib without a window; the same file from the same numbers."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "linattn"
    from matplotlib import pyplot as plt

    return plt


def against_length(axes: Any, x: str, y: str, title: str) -> None:
    """Labels and scales of curves over n, log-log."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=9)
    axes.grid(True, which="major", color="#e4e4e4")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot().close(figure)


def chosen(results: Mapping[str, Any], form: str) -> list[Any]:
    """A row for each peer of a form, at the size nearest to what is shown; slowest last."""

    def distance(row: Any) -> tuple[int, int]:
        return abs(row["data"]["heads"] - SIZE[0]), abs(row["data"]["n"] - SIZE[1])

    best: dict[str, Any] = {}
    for row in results.get(FORMS[form], {}).get("rows", ()):
        peer = row["data"].get("peer")
        if peer is not None and row["data"]["form"] == form:
            best[peer] = min(best.get(peer, row), row, key=distance)
    return sorted(best.values(), key=lambda row: row["value"])


def draw(results: Mapping[str, Any], path: Path) -> bool:
    """How many times as long as ours each peer takes, one panel a form, from the written results.

    False where there is nothing to draw.
    """
    panels = {form: rows for form in FORMS if (rows := chosen(results, form))}
    if not panels:
        return False
    heights = [len(rows) + 1 for rows in panels.values()]
    figure, axes = pyplot().subplots(
        len(panels), sharex=True, squeeze=False, layout="constrained",
        figsize=(7, 0.26 * sum(heights) + 0.3 * len(panels) + 0.5), height_ratios=heights,
    )  # fmt: skip
    for axis, (form, rows) in zip(axes[:, 0], panels.items(), strict=True):
        names, values = ["linattn"], [1.0]
        for row in rows:
            partly = " (does less)" if "softmax" not in (o := row["data"]["omits"]) and o else ""
            n = row["data"]["n"]
            sized = f", n = {n:,}" if n not in (SIZE[1], 1) else ""
            names.append(row["data"]["peer"] + partly + sized)
            values.append(row["value"])
        colours = ["#0b6e99"] + ["#c1440e" if value < 1 else "#8a8a8a" for value in values[1:]]
        bars = axis.barh(names, [value - 1e-3 for value in values], color=colours, height=0.7)
        written = [f"{value:.2g}×" if value < 10 else f"{value:.0f}×" for value in values]
        axis.bar_label(bars, written, padding=3, fontsize=8)
        axis.invert_yaxis()
        axis.set_xscale("log")
        axis.tick_params(axis="y", labelsize=8, length=0)
        axis.set_title("one step" if form == "step" else form, fontsize=9, loc="left")
        axis.axvline(1, color="#0b6e99", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.12)
    axes[-1, 0].set_xlabel(
        f"times as long as linattn; {SIZE[0]} heads × {SIZE[1]:,}, float32, d = 64"
    )
    save(figure, path)
    return True
