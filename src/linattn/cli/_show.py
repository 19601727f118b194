"""How numbers and tables look."""

from __future__ import annotations

import os

from rich.console import Console
from rich.table import Table

from linattn import get_num_threads

__all__ = ["busy", "console", "counted", "seconds", "table", "times"]


def console(stderr: bool = False) -> Console:
    """For text and tables; what is no terminal has room for the widest table."""
    made = Console(highlight=False, stderr=stderr)
    if not made.is_terminal:
        made.width = max(made.width, 100)
    return made


def table(*columns: str) -> Table:
    """A table without lines: the first column to the left, the others to the right."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    return made


def counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def seconds(value: float | None) -> str:
    """A duration; nothing for None."""
    if value is None:
        return ""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def times(value: float | None, ours: float | None) -> str:
    """How many times ours a value is."""
    if value is None or ours is None:
        return ""
    ratio = value / ours
    return f"{ratio:.2f}x" if ratio < 1 else f"{ratio:.1f}x" if ratio < 100 else f"{ratio:,.0f}x"


def busy(console: Console) -> None:
    """A word of warning where other processes use the processors that are to be measured."""
    if not hasattr(os, "getloadavg"):
        return
    load, free = os.getloadavg()[0], os.cpu_count() or 1
    if load > 0.5 * free or load + get_num_threads() > 1.5 * free:
        console.print(
            f"[yellow]This machine is busy (load {load:.1f} on {free} processors): times are "
            "rough, and those of NumPy's threads suffer most.[/]"
        )
