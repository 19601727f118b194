"""Runs every benchmark and writes one table, one JSON file and the pictures.

python benchmarks/run_all.py                 # all of them, some minutes, into build/benchmarks
python benchmarks/run_all.py forward short   # these
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import _picture

HERE = Path(__file__).parent
NAMES = (
    "forward",
    "causal",
    "short",
    "orders",
    "projections",
    "decode",
    "memory",
    "growth",
    "neighbour",
    "floor",
    "call_overhead",
    "length_error",
    "torch_forward",
    "torch_causal",
    "torch_gradients",
    "torch_short",
    "torch_decode",
    "torch_overhead",
    "torch_memory",
    "torch_threads",
)
PICTURES = {"growth": "time", "length_error": "error"}


def table(results: list[dict[str, Any]]) -> str:
    """Everything as markdown: first what has a target, then each benchmark in full."""
    machine = results[0]["machine"]
    lines = [
        f"linattn {machine['linattn']} ({machine['instruction_set'] or machine['backend']}, "
        f"{machine['threads']} threads), NumPy {machine['numpy']} ({machine['blas']}), "
        f"{machine['cpu']}",
        "",
        "| benchmark | float32 matrix product | copy, all threads | copy, one | other processes |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        m = result["machine"]
        lines.append(
            f"| {result['benchmark']} | {m['matmul_rate'] / 1e9:.1f} GFLOP/s "
            f"| {m['copy_rate'] / 1e9:.1f} GB/s | {m['copy_rate_1'] / 1e9:.1f} GB/s "
            + ("| unknown |" if result["others"] is None else f"| {result['others']:.0%} |")
        )
    lines += [
        "",
        "## Targets",
        "",
        "| benchmark | what | measured | target | |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        for row in result["rows"]:
            if row["target"]:
                lines.append(
                    f"| {result['benchmark']} | {row['what']} | {row['shown']} | {row['target']} "
                    f"| {row['verdict']} |"
                )
    for result in results:
        lines += ["", f"## {result['benchmark']}", "", result["question"], ""]
        lines += [f"- {note}" for note in result["notes"]]
        lines += [""] * bool(result["notes"])
        lines += ["| what | measured | target | | |", "|---|---|---|---|---|"]
        lines += [
            f"| {row['what']} | {row['shown']} | {row['target']} | {row['verdict']} "
            f"| {row['note']} |"
            for row in result["rows"]
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "benchmarks")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: do they run?")
    parser.add_argument("--format", default="svg", help="of the pictures: svg (default), png")
    given = parser.parse_args()
    unknown = set(given.names) - set(NAMES)
    if unknown:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    given.out.mkdir(parents=True, exist_ok=True)
    results = []
    for name in given.names or NAMES:
        answer = given.out / f"{name}.json"
        warnings = [f"-W{option}" for option in sys.warnoptions]
        command = [sys.executable, *warnings, str(HERE / f"{name}.py"), "--json", str(answer)]
        command += ["--quick"] * given.quick
        if name in PICTURES:
            command += ["--plot", str(given.out / f"{PICTURES[name]}.{given.format}")]
        subprocess.run(command, check=True)
        print(flush=True)
        results.append(json.loads(answer.read_text("utf-8")))
    (given.out / "results.json").write_text(json.dumps(results, indent=1), "utf-8")
    (given.out / "results.md").write_text(table(results), "utf-8")
    # Of a run of some benchmarks only, the picture takes the others from the run before.
    files = [path for name in NAMES if (path := given.out / f"{name}.json").exists()]
    written = {path.stem: json.loads(path.read_text("utf-8")) for path in files}
    _picture.draw(written, given.out / f"peers.{given.format}")
    judged = [r for result in results for r in result["rows"] if r["reached"] is not None]
    print(
        f"{sum(r['reached'] for r in judged)} of {len(judged)} targets reached; "
        f"{given.out / 'results.md'}"
    )


if __name__ == "__main__":
    main()
