"""Puts measured figures into the pages, from what `python benchmarks/run_all.py` wrote.

    python benchmarks/run_all.py    # some minutes, on a quiet machine
    python docs/figures.py          # from build/benchmarks into README.md and docs/

What stands between `<!-- figures: NAME -->` and `<!-- end -->` is replaced, and nothing else. NAME
is `top`, `machine`, `missed`, `peers`, or `rows BENCHMARK [EXPRESSION]`: rows of a benchmark, those
whose name the regular expression finds. Pictures go to docs/assets.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import _picture  # noqa: E402

BLOCK = re.compile(r"(<!-- figures: (\w+)((?: [^\n]*?)?) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
PICTURES = ("time.svg", "error.svg", "peers.svg")
TIME = r"[\d.,]+ (?:s|ms|us|ns)\b"
SETS = {"avx512": "AVX-512", "avx2": "AVX2", "neon": "NEON"}
COMMAND = "`python benchmarks/run_all.py`"

Result = dict[str, Any]


def pages() -> list[Path]:
    """All that have such a block."""
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if BLOCK.search(page.read_text("utf-8"))]


def read(folder: Path) -> dict[str, Result]:
    """What each benchmark wrote; they may have run at different times."""
    files = [path for path in sorted(folder.glob("*.json")) if path.name != "results.json"]
    found = [json.loads(path.read_text("utf-8")) for path in files]
    return {result["benchmark"]: result for result in found}


def filled(text: str, results: dict[str, Result]) -> str:
    """A page with its figures."""

    def block(found: re.Match[str]) -> str:
        begin, name, rest, _, end = found.groups()
        return f"{begin}\n{MAKERS[name](results, *[rest.strip()] * bool(rest))}\n\n{end}"

    return BLOCK.sub(block, text)


# ---------------------------------------------------------------------------------------- blocks


def top(results: dict[str, Result]) -> str:
    """The comparisons that come first."""
    lines = ["| one call | | linattn | |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(row) + " |" for row in comparisons(results)]
    machine = results["forward"]["machine"]
    core = SETS.get(machine["instruction_set"], machine["instruction_set"])
    rate = machine["matmul_rate"] / 1e9
    lines += [
        "",
        f"float32, d = 64, {machine['threads']} threads of an {machine['cpu']} with {core}. "
        f"NumPy's matrix product ran at {rate:.0f} GFLOP/s; counted alike, the full form reached "
        f"{shares(results, 'forward')} of that, the causal one {shares(results, 'causal')}. "
        f"Measured by {COMMAND}; {quiet(results)}.",
    ]
    return "\n".join(lines)


def comparisons(results: dict[str, Result]) -> Iterator[tuple[str, str, str, str]]:
    """What, their time, ours, the ratio."""
    for heads, n in ((1, 65536), (8, 8192)):
        share = one(results, "forward", "share of the matmul rate", heads, n)
        row = one(results, "forward", "faster than the textbook", heads, n)
        yield sized(row), f"textbook in NumPy: {time(row)}", time(share), ratio(row)
    share = one(results, "causal", "share of the matmul rate", 8, 8192)
    for name in ("NumPy in chunks", "torch SDPA"):
        row = one(results, "causal", f"faster than {name}", 8, 8192, name != "torch SDPA")
        if row is not None:
            other = "softmax attention in torch" if "SDPA" in name else name
            yield f"{sized(row)}, causal", f"{other}: {time(row)}", time(share), ratio(row)
    row = one(results, "short", "faster than the textbook", 1, 128)
    theirs = re.search(f"textbook ({TIME})", row["note"])[1]
    yield sized(row), f"textbook in NumPy: {micro(theirs)}", time(row), ratio(row)
    step = one(results, "decode", "our step", 8, None)
    row = one(results, "decode", "faster than NumPy's", None, None)
    yield "a step of decoding, 8 heads", f"NumPy: {time(row)}", step_time(step), ratio(row)
    ours = one(results, "memory", "full, 1 x", 1, 8192)
    theirs = one(results, "memory", "the textbook", 1, 8192)
    yield (
        f"memory beyond inputs and output, {sized(ours)}",
        f"textbook in NumPy: {mebi(theirs)}",
        mebi(ours),
        f"{theirs['value'] / max(ours['value'], 0.01):.0f}x",
    )


def machine(results: dict[str, Result]) -> str:
    """What was measured on, and how quiet it was."""
    m = results["forward"]["machine"]
    rates = [r["machine"]["matmul_rate"] / 1e9 for r in results.values()]
    return (
        f"linattn {m['linattn']} ({m['instruction_set'] or m['backend']}), {m['threads']} threads; "
        f"NumPy {m['numpy']} ({m['blas']}), Python {m['python']}; {m['cpu']}. NumPy's float32 "
        f"matrix product ran at {min(rates):.0f} … {max(rates):.0f} GFLOP/s, a copy on all threads "
        f"at {m['copy_rate'] / 1e9:.0f} GB/s (read plus written); {quiet(results)}."
    )


def missed(results: dict[str, Result]) -> str:
    """Targets, and how many are reached; those that aren't."""
    rows = [(r, row) for r in results.values() for row in r["rows"] if row["target"]]
    reached = sum(row["reached"] is True for _, row in rows)
    off = [(r, row) for r, row in rows if row["reached"] is not True]
    lines = [f"{reached} of {len(rows)} targets were reached in this run."]
    if off:
        lines += ["", "| benchmark | what | measured | target | |", "|---|---|---|---|---|"]
        lines += [
            f"| `{r['benchmark']}.py` | {named(row)} | {micro(row['shown'])} | {row['target']} "
            f"| {row['verdict']} |"
            for r, row in off
        ]
    return "\n".join(lines)


def rows(results: dict[str, Result], chosen: str) -> str:
    """Rows of a benchmark as a table, with its target where there is one."""
    name, _, expression = chosen.partition(" ")
    if not results[name]["rows"]:
        return "Not measured: this needs torch."
    found = [row for row in results[name]["rows"] if re.search(expression, row["what"])]
    if not found:
        raise SystemExit(f"figures: no row of {name} is found by {expression!r}")
    lines = [f"| `{name}.py` | measured [quartiles] | target | |", "|---|---|---|---|"]
    lines += [
        f"| {named(row)} | {micro(row['shown'])} | {row['target']} | {micro(row['note'])} |"
        for row in found
    ]
    return "\n".join(lines)


def peers(results: dict[str, Result]) -> str:
    """Each other library at one size, and then all sizes at which one of them is faster."""
    lines = [
        "| form, heads × n | | takes | linattn | | it leaves out |",
        "|---|---|---|---|---|---|",
    ]
    for form in _picture.FORMS:
        lines += [f"| {compared(row)} |" for row in _picture.chosen(results, form)]
    if len(lines) == 2:
        return "Not measured: this needs torch."
    everything = [
        row for name in sorted({*_picture.FORMS.values(), "torch_short"} & set(results))
        for row in results[name]["rows"] if "peer" in row["data"]
    ]  # fmt: skip
    lost = [row for row in everything if row["value"] < 1]
    lines += ["", f"Of {len(everything)} comparisons, all sizes, linattn is slower in {len(lost)}."]
    if lost:
        lines += ["", *lines[:2], *(f"| {compared(row)} |" for row in lost)]
    return "\n".join(lines)


def compared(row: Any) -> str:
    """Form and size, who, their time, ours, the ratio, what theirs leaves out."""
    data = row["data"]
    heads, form = data["heads"], data["form"]
    size = f"{heads} × {data['n']:,}" if form != "step" else f"{heads} head{'s' * (heads > 1)}"
    ours = micro(written(data["ours"]))
    cells = f"{form}, {size}", data["peer"], micro(written(data["theirs"])), ours
    return " | ".join((*cells, f"**{row['value']:.2f}x**", data["omits"]))


MAKERS = {"top": top, "machine": machine, "missed": missed, "peers": peers, "rows": rows}


# ----------------------------------------------------------------------------------- single values


def one(
    results: dict[str, Result], name: str, what: str, heads: Any, n: Any, needed: bool = True
) -> Any:
    """The row of a benchmark whose name has this in it; the nearest n where that isn't there."""
    found = [
        row
        for row in results[name]["rows"]
        if what in row["what"] and heads in (None, row["data"].get("heads"))
    ]
    if not found:
        if needed:
            raise SystemExit(f"figures: {name} has no row {what!r} of {heads} heads")
        return None
    if n is None:
        return found[0]
    return min(found, key=lambda row: abs(row["data"].get("n", n) - n))


def named(row: Any) -> str:
    """What a row measures, with its dtype where that isn't the usual one."""
    dtype = row["data"].get("dtype", "float32")
    return row["what"] if dtype in ("float32", *row["what"].split()) else f"{row['what']}, {dtype}"


def shares(results: dict[str, Result], name: str) -> str:
    """From the least to the most that a benchmark reached of the matrix product's rate."""
    rows = results[name]["rows"]
    found = [r["value"] for r in rows if "heads" in r["data"] and "share" in r["what"]]
    return f"{min(found):.2f} … {max(found):.2f}"


def sized(row: Any) -> str:
    heads, n = row["data"]["heads"], row["data"]["n"]
    return f"{heads} head{'s' if heads > 1 else ''} × {n:,}"


def time(row: Any) -> str:
    """The first time in a row's note."""
    return micro(re.search(TIME, row["note"])[0])


def step_time(row: Any) -> str:
    return f"{row['value']:.3g} µs"


def written(value: float) -> str:
    """Seconds as the benchmarks print them."""
    unit, size = next((u, s) for u, s in (("s", 1), ("ms", 1e-3), ("us", 1e-6)) if value >= s)
    return f"{value / size:.3g} {unit}"


def micro(text: str) -> str:
    return re.sub(r"\bus\b", "µs", text)


def ratio(row: Any) -> str:
    return f"**{row['value']:.1f}x**" if row["value"] < 100 else f"**{row['value']:.0f}x**"


def mebi(row: Any) -> str:
    return f"{row['value']:.3g} MiB"


def quiet(results: dict[str, Result]) -> str:
    """What others had of the machine while times were taken."""
    timed = [r for name, r in results.items() if name != "length_error"]
    shares = [share for r in timed if (share := r.get("others")) is not None]
    if not shares:
        return "what else ran there isn't known"
    if max(shares) < 0.03:
        return "a virtual machine with nothing else running in it"
    return (
        f"other processes had {min(shares):.0%} … {max(shares):.0%} of the machine meanwhile, so "
        "the figures are rough"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build" / "benchmarks")
    given = parser.parse_args()
    results = read(given.folder)
    if any(result["quick"] for result in results.values()):
        parser.error(f"{given.folder} holds a run with --quick, which measures nothing")
    for page in pages():
        page.write_text(filled(page.read_text("utf-8"), results), "utf-8")
    for name in PICTURES:
        if (given.folder / name).exists():
            shutil.copyfile(given.folder / name, ROOT / "docs" / "assets" / name)


if __name__ == "__main__":
    main()
