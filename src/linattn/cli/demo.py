"""`linattn demo`: what linear attention is, that it is right, and what it saves."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.text import Text

from linattn import (
    feature_maps,
    linear_attention,
    plan,
    reference,
    set_num_threads,
    show_config,
)

from . import _files, _measure, _picture, _show
from ._failure import Failure, fail
from ._files import size_of

__all__ = ["demo"]

Array = Any

LENGTHS = tuple(2**i for i in range(4, 17))  # 16 ... 65,536
MEMORY_LENGTHS = (512, 2048, 8192, 32768)
EXPLAINED = (128, 1024, 8192, 10_000)
LONGEST = 2.0  # seconds that a single call may take
DEADLINE = 25.0  # seconds after which no further length is begun
SETTLED = 2048  # from here on every form uses all threads: growth is fitted to these
ROWS = 2048  # queries that are checked where there are more
ALLOWED = 4.0  # error in units of what rounding explains; 0.7 is the most that was seen
MATRIX_BYTES = 1 << 30  # the n x n forms use no more

# The forms that are compared: key, heading, and in the picture's legend
FORMS = {
    "linear": ("linear", "linear attention (linattn)"),
    "quadratic": ("quadratic", "the same, quadratic order (linattn)"),
    "textbook": ("textbook", "linear attention, textbook NumPy"),
    "softmax": ("softmax", "softmax attention, in blocks"),
    "textbook softmax": ("softmax n × n", "softmax attention, textbook NumPy"),
}


def demo(
    files: _files.Given = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Positions of the random arrays.")] = 128,
    d: Annotated[int, typer.Option("--d", min=1, help="Features of the random arrays.")] = 64,
    feature_map: Annotated[
        str, typer.Option(help=f"φ, of {', '.join(feature_maps.names())}.")
    ] = "elu1",
    longest: Annotated[
        int, typer.Option(min=1, help="The longest sequence to time; shorter is faster.")
    ] = LENGTHS[-1],
    plot: Annotated[
        str | None, typer.Option(help="Draw time and memory into this file (.png, .svg, .pdf).")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random arrays.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads to use.")] = None,
) -> None:
    """What linear attention is, that it is right, and what it saves. Takes under a minute."""
    started = time.perf_counter()
    found = feature_maps.get(feature_map)
    if found.name not in feature_maps.names():
        fail(
            f"--feature-map: expected one of {', '.join(feature_maps.names())}, which the textbook "
            f"function has too, got {feature_map!r}; linattn fidelity takes all"
        )
    if plot is not None:
        plot = _picture.checked(plot)
    if threads is not None:
        set_num_threads(threads)
    console = _show.console()
    with tempfile.TemporaryDirectory(prefix="linattn-") as scratch:
        if files:
            q, k, v = (_finite(x) for x in _files.inputs(files, ("q", "k", "v"), scratch))
        else:
            q, k, v = _measure.arrays([(n, d)] * 3, np.float32, seed)
        out = linear_attention(q, k, v, found)
        _about(console, q, found.name)
        _shapes(console, q, k, v, out)
        _orders(console, q, k, v)
        right = _check(console, q, k, v, out, found.name)
        d_k = k.shape[-1]
        del q, k, v, out
    times = _times(console, d_k, found.name, longest, started)
    memory = _memory(console, d_k, found.name, longest, started)
    if plot is not None:
        _draw(plot, times, memory, d_k)
        console.print(f"\nPicture: {plot}")
    console.print(f"\n[dim]{time.perf_counter() - started:.0f} s in all.[/]")
    if not right:
        raise Failure("the check failed: the result is not linear attention; please report it")


def _finite(x: _files.Input) -> Array:
    """The array of a file: what is not finite could not be checked."""
    count = x.array.size - np.count_nonzero(np.isfinite(x.array))
    if count:
        fail(f"{x}: expected finite numbers, got {count:,} that are not; attend takes them")
    return x.array


# What it is


def _title(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, style="bold"))


def _about(console: Console, q: Array, name: str) -> None:
    config = show_config()
    core = config.instruction_set or "no compiled core: the slower array backend"
    console.print(
        f"[bold]linattn {config.version}[/]  {core}, {config.threads} threads, NumPy {config.numpy}"
    )
    if config.remedy:
        console.print(f"To get the fast one: {config.remedy}")
    eps = feature_maps.get(name).eps
    console.print(f"\n    out = φ(Q) (φ(K)ᵀ V) / (φ(Q) φ(K)ᵀ1 + ε)      φ = {name}, ε = {eps:g}")


def _shapes(console: Console, q: Array, k: Array, v: Array, out: Array) -> None:
    _title(console, f"Shapes ({q.dtype})")
    batch = np.broadcast_shapes(k.shape[:-2], v.shape[:-2])
    d_k, d_v = k.shape[-1], v.shape[-1]
    table = _show.table("", "", "", "")
    table.show_header = False
    table.add_row("Q", str(q.shape), "φ(Q)", str(q.shape))
    table.add_row("K", str(k.shape), "φ(K)", str(k.shape))
    table.add_row("V", str(v.shape), "S = φ(K)ᵀV", str((*batch, d_k, d_v)))
    table.add_row("out", str(out.shape), "Z = φ(K)ᵀ1", str((*batch, d_k)))
    console.print(table)


def _orders(console: Console, q: Array, k: Array, v: Array) -> None:
    _title(console, "Two ways to multiply the same product")
    n_q, n_k, d_k, d_v = q.shape[-2], k.shape[-2], k.shape[-1], v.shape[-1]
    here = plan(n_q, n_k, d_k, d_v)
    console.print(
        f"Linear order: φ(K)ᵀV first, a {d_k:,} × {d_v:,} aggregate of {here.linear.elements:,} "
        f"numbers. Quadratic order: φ(Q)φ(K)ᵀ first, a {n_q:,} × {n_k:,} matrix of "
        f"{here.quadratic.elements:,} numbers, {here.compression:,.1f}x as many."
    )
    table = _show.table("n", "aggregate", "matrix", "matrix is", "operations: linear", "quadratic")
    for p in [here, *(plan(n, n, d_k, d_v) for n in EXPLAINED if (n, n) != (n_q, n_k))]:
        table.add_row(
            f"{p.n_q:,}" if p.n_q == p.n_k else f"{p.n_q:,} × {p.n_k:,}",
            f"{p.linear.elements:,}",
            f"{p.quadratic.elements:,}",
            f"{p.compression:,.1f}x",
            f"{p.linear.operations:,}",
            f"{p.quadratic.operations:,}",
        )
    console.print(table)
    console.print(f"By operations, the linear order is no dearer from n = {here.crossover:,}.")


# That it is right


def _check(console: Console, q: Array, k: Array, v: Array, out: Array, name: str) -> bool:
    """Against the other order and the definition in float64, for all rows or a sample of them."""
    _title(console, "Check")
    n_q = q.shape[-2]
    rows = np.arange(n_q)
    if max(n_q, k.shape[-2]) > ROWS:
        rows = np.unique(np.linspace(0, n_q - 1, min(n_q, 256)).astype(int))
        console.print(f"{len(rows):,} of {n_q:,} queries, against all keys.")
    q, out = q[..., rows, :], out[..., rows, :]
    expected = reference.double_sum(q, k, v, name)
    one = np.finfo(np.float64 if out.dtype == np.float64 else np.float32).eps
    coarse = _epsilon(out.dtype)
    allowed = one * reference.error_bound(q, k, v, name) + coarse * np.abs(expected)
    table = _show.table("linear order against", "largest difference", "rounding explains", "")
    right = True
    for what, other in (
        ("the definition in float64", expected),
        ("the quadratic order", linear_attention(q, k, v, name, order="quadratic")),
    ):
        with np.errstate(all="ignore"):
            off = np.abs(out.astype(np.float64) - np.asarray(other).astype(np.float64))
            good = bool(np.all((off <= ALLOWED * allowed) | (allowed == np.inf)))
        right &= good
        table.add_row(
            what,
            f"{off.max(initial=0):.1e}",
            f"{allowed.max(initial=0):.1e}",
            Text("ok", "green") if good else Text("WRONG", "bold red"),
        )
    console.print(table)
    return right


def _epsilon(dtype: Any) -> float:
    return 2.0**-8 if dtype.name == "bfloat16" else float(np.finfo(dtype).eps)


# What it saves


@dataclass
class Series:
    """Measured values of one form over n."""

    n: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, n: int, value: float) -> None:
        self.n.append(n)
        self.values.append(value)

    def at(self, n: int) -> float | None:
        return self.values[self.n.index(n)] if n in self.n else None

    def growth(self, least: float = 0) -> _measure.Fit | None:
        return _measure.fit(self.n, self.values, least)


def _times(console: Console, d: int, name: str, longest: int, started: float) -> dict[str, Series]:
    _title(console, f"Time of one call (float32, one head, d = {d})")
    forms = ("linear", "quadratic", "textbook", "softmax")
    found = {form: Series() for form in forms}
    stopped: set[str] = set()
    _show.busy(console)
    table = _show.table("n", *(FORMS[f][0] for f in forms), "textbook is", "softmax is")
    with console.status("measuring") as status:
        for n in _lengths(LENGTHS, longest):
            status.update(f"measuring n = {n:,}")
            q, k, v = _measure.arrays([(n, d)] * 3, np.float32)
            calls = _measure.calls(q, k, v, name)
            for form in forms:
                if form in stopped:
                    continue
                _measure.rest()
                with np.errstate(all="ignore"):
                    taken = _measure.seconds(calls[form], 0.06)
                found[form].add(n, taken)
                growth = 4 if form in ("quadratic", "softmax") else 2
                if growth * taken > LONGEST:
                    stopped.add(form)
            here = [found[form].at(n) for form in forms]
            table.add_row(
                f"{n:,}",
                *(_show.seconds(t) for t in here),
                *(_show.times(t, here[0]) for t in here[2:]),
            )
            if time.perf_counter() - started > DEADLINE:
                break
    least = SETTLED if longest >= 4 * SETTLED else 0
    growths = {form: found[form].growth(least) for form in forms}
    table.add_section()
    table.add_row(
        "grows as", *(f"n^{g.exponent:.2f}" if g else "" for g in growths.values()), "", ""
    )
    console.print(table)
    if least:
        console.print(f"Growth is fitted to n ≥ {least:,}. Blank: a call would take too long.")
    for form, what in (
        ("quadratic", "its own quadratic order"),
        ("textbook", "the textbook function"),
        ("softmax", "softmax attention"),
    ):
        console.print(_crossing(what, found["linear"], found[form]))
    return found


def _lengths(lengths: tuple[int, ...], longest: int) -> list[int]:
    return [n for n in lengths if n <= longest] or [longest]


def _crossing(what: str, ours: Series, theirs: Series) -> str:
    """Where linear attention becomes the faster one."""
    n = [m for m in theirs.n if m in ours.n]
    pairs = [(ours.at(m) or 0.0, theirs.at(m) or 0.0) for m in n]
    at = _measure.crossover(n, [mine for mine, _ in pairs], [other for _, other in pairs])
    if at is None:
        return f"Not faster than {what} at any length up to n = {n[-1]:,}."
    if at == n[0]:
        return f"Faster than {what} at every length measured, from n = {n[0]:,}."
    return f"Faster than {what} from about n = {at:,.0f}."


def _memory(console: Console, d: int, name: str, longest: int, started: float) -> dict[str, Series]:
    _title(console, "Peak memory beyond inputs and output")
    forms = ("linear", "textbook", "softmax", "textbook softmax")
    found = {form: Series() for form in forms}
    table = _show.table("n", *(FORMS[f][0] for f in forms))
    largest = min(MATRIX_BYTES, _available() // 4)
    with console.status("measuring memory") as status:
        for n in _lengths(MEMORY_LENGTHS, longest):
            if time.perf_counter() - started > 1.6 * DEADLINE:
                break
            status.update(f"measuring memory at n = {n:,}")
            for form in forms:
                if form == "textbook softmax" and 12 * n * n > largest:
                    continue
                if form == "softmax" and n > 8192:
                    continue
                peak = _measure.extra_memory(form, n, d, name)
                if peak is not None:
                    found[form].add(n, max(peak, 4096))  # a page: so that its logarithm exists
            here = [found[form].at(n) for form in forms]
            table.add_row(f"{n:,}", *("" if b is None else size_of(b) for b in here))
    if not any(s.n for s in found.values()):
        console.print("Not measured: this system does not tell the peak of a process.")
        return found
    console.print(table)
    console.print(
        "The high-water mark of a fresh process's resident memory over one call, its first, "
        "threads and workspace included. By its plan, linear attention uses at most "
        f"{size_of(plan(1, 1, d, threads=show_config().threads).peak_bytes)}, whatever n. "
        "Blank: not measured, as it would take too long or too much."
    )
    return found


def _available() -> int:
    """Bytes of memory that are free, as far as the system tells."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 2 << 30


def _draw(path: str, times: dict[str, Series], memory: dict[str, Series], d: int) -> None:
    styles = list(FORMS)

    def lines(found: dict[str, Series], note: Callable[[Series], str]) -> list[_picture.Line]:
        made = []
        for form, series in found.items():
            made.append(
                _picture.Line(
                    FORMS[form][1], series.n, series.values, styles.index(form), note(series)
                )
            )
        return made

    def growth(series: Series) -> str:
        fitted = series.growth(SETTLED) or series.growth()
        return f"∝ $n^{{{fitted.exponent:.2f}}}$" if fitted else ""

    def last(series: Series) -> str:
        return size_of(series.values[-1]) if series.values else ""

    config = show_config()
    _picture.draw(
        path,
        f"Attention of one head, d = {d}, float32, {config.threads} threads",
        [
            _picture.Panel("time of one call", "seconds", lines(times, growth)),
            _picture.Panel("peak memory beyond inputs and output", "bytes", lines(memory, last)),
        ],
        "positions n",
    )
