"""`linattn bench`: a sweep over sizes, dtypes, threads and forms, on this machine."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
import typer

from linattn import (
    State,
    feature_maps,
    get_num_threads,
    linear_attention,
    set_num_threads,
    show_config,
    softmax_attention,
)

from . import _files, _measure, _picture, _show
from ._failure import Failure, brought, fail

__all__ = ["bench"]

Array = Any

FORMS = ("parallel", "chunked", "recurrent")
DTYPES = ("float16", "bfloat16", "float32", "float64")
AGAINST = ("quadratic", "textbook", "softmax")
STYLES, PRODUCT = (0, 3, 2, 5, 4, 1), 6  # of lines: neighbours differ well, and the product's own
LONGEST = 4.0  # seconds that what we compare with may take


@dataclasses.dataclass
class Row:
    """One measurement. operations: 4 n D d_v for each head, n = 1 where recurrent."""

    form: str
    n: int
    d: int
    heads: int
    dtype: str
    threads: int
    seconds: float
    operations: int
    rate: float  # operations a second
    of_matmul: float  # that rate over that of a matrix product
    against: dict[str, float]  # seconds of the others


def bench(
    n: Annotated[
        str, typer.Option("--n", help="Lengths, separated by commas.")
    ] = "128,1024,8192,65536",
    d: Annotated[str, typer.Option("--d", help="Features of keys and values.")] = "64",
    heads: Annotated[str, typer.Option(help="Heads.")] = "1",
    dtype: Annotated[str, typer.Option(help=f"Of {', '.join(DTYPES)}.")] = "float32",
    threads: Annotated[str | None, typer.Option(help="Threads; as many as usual.")] = None,
    form: Annotated[str, typer.Option(help=f"Of {', '.join(FORMS)}.")] = "parallel,chunked",
    feature_map: Annotated[str, typer.Option(help="φ, by name.")] = "elu1",
    against: Annotated[
        str, typer.Option(help=f"What to compare with, of {', '.join(AGAINST)}; '' for nothing.")
    ] = "textbook",
    budget: Annotated[float, typer.Option(min=0, help="Seconds for a measurement.")] = 0.2,
    as_json: Annotated[
        str | None, typer.Option("--json", help="Write the results into this file; - for stdout.")
    ] = None,
    plot: Annotated[
        str | None, typer.Option(help="Draw time and rate into this file (.png, .svg, .pdf).")
    ] = None,
) -> None:
    """Time linear attention over all combinations of the sizes, dtypes, threads and forms given.

    Rates count 4 n D d_v operations a head, causal or not, so that they can be held against the
    machine's matrix product, which is measured in the same run.
    """
    lengths, widths, head_counts = _sizes("--n", n), _sizes("--d", d), _sizes("--heads", heads)
    dtypes = _names("--dtype", dtype, DTYPES)
    forms = _names("--form", form, FORMS)
    others = _names("--against", against, AGAINST) if against else []
    usual = get_num_threads()
    thread_counts = [usual] if threads is None else _sizes("--threads", threads)
    found = _measure.named_map(feature_map)
    if plot is not None:
        plot = _picture.checked(plot)
        if forms == ["recurrent"]:
            fail(f"--plot {plot}: a picture needs a form over lengths: parallel or chunked")
    if as_json not in (None, "-"):
        as_json = _files.checked_output(str(as_json), "--json", (".json",))
    kinds = {name: _dtype(name) for name in dtypes}

    console = _show.console(stderr=as_json == "-")
    matmul = _measure.matmul_rate()
    config = show_config()
    console.print(
        f"linattn {config.version}, {config.instruction_set or 'no compiled core'}; NumPy's "
        f"float32 matrix product: {matmul / 1e9:.3g} GFLOP/s"
    )
    _show.busy(console)
    columns: dict[str, Sequence[object]] = {
        "form": forms,
        "n": [f"{length:,}" for length in lengths],
        "d": widths,
        "heads": head_counts,
        "dtype": dtypes,
        "threads": thread_counts,
    }
    fixed = {name: values[0] for name, values in columns.items() if len(values) == 1}
    console.print(", ".join(f"{name} {value}" for name, value in fixed.items()))
    shown = [name for name in columns if name not in fixed]
    table = _show.table(*shown, "time", "GFLOP/s", "of matmul", *(f"{o} is" for o in others))
    rows: list[Row] = []
    combinations = list(
        itertools.product(forms, dtypes, head_counts, widths, thread_counts, lengths)
    )
    try:
        with console.status("measuring") as status:
            for which, kind, h, width, count, length in combinations:
                status.update(f"measuring {which}, n = {length:,}")
                set_num_threads(count)
                if which == "recurrent" and length != lengths[0]:
                    continue  # a step does not know how many came before
                calls = _calls(which, kinds[kind], h, width, length, found.name, others)
                D = found.width(width) or width
                row = _row(which, kind, h, width, D, count, length, calls, matmul, budget)
                rows.append(row)
                table.add_row(*_cells(row, shown, others))
    finally:
        set_num_threads(usual)
    console.print(table)
    about = {"about": dataclasses.asdict(config), "matmul_rate": matmul, "feature_map": found.name}
    text = json.dumps(about | {"rows": [dataclasses.asdict(row) for row in rows]}, indent=2)
    if as_json == "-":
        print(text)
    elif as_json is not None:
        with _files.replacing(as_json, "--json") as file:
            file.write((text + "\n").encode())
    if plot is not None:
        _draw(plot, rows, matmul)
        console.print(f"Picture: {plot}")


def _sizes(option: str, text: str) -> list[int]:
    try:
        found = [int(part.strip().replace("_", "")) for part in text.split(",")]
    except ValueError:
        raise Failure(f"{option}: expected integers separated by commas, got {text!r}", 2) from None
    if min(found) < 1:
        raise Failure(f"{option}: expected integers of at least 1, got {min(found)}", 2)
    return found


def _names(option: str, text: str, known: Sequence[str]) -> list[str]:
    found = [part.strip() for part in text.split(",")]
    for name in found:
        if name not in known:
            raise Failure(f"{option}: expected {', '.join(known)}, got {name!r}", 2)
    return found


def _dtype(name: str) -> Any:
    if name == "bfloat16":
        return np.dtype(brought("ml_dtypes", "'linattn[cli]'", "bfloat16").bfloat16)
    return np.dtype(name)


def _calls(
    form: str, dtype: Any, heads: int, d: int, n: int, name: str, others: Sequence[str]
) -> dict[str, Callable[[], object]]:
    """What to time, by name: ours under that of the form."""
    rows = 1 if form == "recurrent" else n
    q, k, v = _measure.arrays([(heads, rows, d)] * 3, dtype)
    out = np.empty_like(q)
    if form == "recurrent":
        state = State.zeros((heads,), feature_maps.get(name).width(d) or d, d, name, dtype)
        return {form: lambda: state.step(q, k, v, out=out)}
    causal = form == "chunked"
    found: dict[str, Callable[[], object]] = {
        form: lambda: linear_attention(q, k, v, name, causal=causal, order="linear", out=out)
    }
    textbook_map = _measure.textbook_map(name)
    if "quadratic" in others and not causal:
        found["quadratic"] = lambda: linear_attention(q, k, v, name, order="quadratic", out=out)
    if dtype.itemsize < 4:  # NumPy has no fast products of these
        return found
    if "textbook" in others and not causal:
        found["textbook"] = lambda: _measure.textbook(q, k, v, textbook_map)
    if "softmax" in others:
        found["softmax"] = lambda: softmax_attention(q, k, v, causal=causal, out=out)
    return found


def _row(
    form: str,
    dtype: str,
    heads: int,
    d: int,
    D: int,
    threads: int,
    n: int,
    calls: dict[str, Callable[[], object]],
    matmul: float,
    budget: float,
) -> Row:
    times = {}
    for name, call in calls.items():
        # An operation of the n x n forms takes at most as long as in the slowest matrix product.
        if name in ("quadratic", "softmax") and 4 * heads * n * n * d / matmul > LONGEST:
            continue
        _measure.rest()
        with np.errstate(all="ignore"):
            times[name] = _measure.seconds(call, budget)
    operations = 4 * (1 if form == "recurrent" else n) * D * d * heads
    taken = times.pop(form)
    rate = operations / taken
    return Row(form, n, d, heads, dtype, threads, taken, operations, rate, rate / matmul, times)


def _cells(row: Row, shown: Sequence[str], others: Sequence[str]) -> list[str]:
    about = {
        "form": row.form,
        "n": "1" if row.form == "recurrent" else f"{row.n:,}",
        "d": f"{row.d:,}",
        "heads": f"{row.heads:,}",
        "dtype": row.dtype,
        "threads": f"{row.threads}",
    }
    return [
        *(about[name] for name in shown),
        _show.seconds(row.seconds),
        f"{row.rate / 1e9:.3g}",
        f"{row.of_matmul:.2f}",
        *(_show.times(row.against.get(other), row.seconds) for other in others),
    ]


def _draw(path: str, rows: Sequence[Row], matmul: float) -> None:
    lines: dict[str, list[Row]] = {}
    walked = [row for row in rows if row.form != "recurrent"]
    for row in walked:
        about = [row.form]
        for name, unit in (("heads", "head"), ("d", "feature"), ("threads", "thread")):
            if len({getattr(other, name) for other in walked}) > 1:
                about.append(_show.counted(getattr(row, name), unit))
        if len({other.dtype for other in walked}) > 1:
            about.append(row.dtype)
        lines.setdefault(", ".join(about), []).append(row)
    taken, rates = [], []
    for i, (name, found) in enumerate(lines.items()):
        style = STYLES[i % len(STYLES)] + len(_picture.COLOURS) * (i // len(STYLES))
        found = sorted(found, key=lambda row: row.n)
        n = [row.n for row in found]
        taken.append(_picture.Line(name, n, [row.seconds for row in found], style))
        rates.append(_picture.Line(name, n, [row.rate / 1e9 for row in found], style))
    longest = sorted({row.n for row in rows})
    rates.append(
        _picture.Line("NumPy's matrix product", longest, [matmul / 1e9] * len(longest), PRODUCT)
    )
    config = show_config()
    _picture.draw(
        path,
        f"linattn {config.version}, {config.instruction_set or 'no compiled core'}",
        [
            _picture.Panel("time of one call", "seconds", taken),
            _picture.Panel("rate, counted as 4·n·D·d_v a head", "GFLOP/s", rates),
        ],
        "positions n",
    )
