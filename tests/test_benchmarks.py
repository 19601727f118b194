"""Every benchmark runs; no time is judged here."""

import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
NAMES = sorted(
    path.stem for path in BENCHMARKS.glob("[!_]*.py") if path.stem not in ("run_all", "__init__")
)


def run(name, *arguments):
    command = [sys.executable, "-W", "error", str(BENCHMARKS / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=900)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_run_and_their_figures_are_found(tmp_path):
    """Once through all of them, and what they wrote goes into the pages."""
    printed = run("run_all", "--quick", "--out", str(tmp_path))
    assert "0 of 0 targets" in printed
    text = (tmp_path / "results.md").read_text("utf-8")
    for name in NAMES:
        result = json.loads((tmp_path / f"{name}.json").read_text("utf-8"))
        assert result["benchmark"] == name and f"## {name}" in text
        assert result["machine"]["matmul_rate"] > 0 and result["machine"]["copy_rate"] > 0
        assert result["rows"] or "skipped" in printed
        for row in result["rows"]:
            assert row["low"] <= row["value"] <= row["high"]
            assert row["reached"] is None  # tiny sizes say nothing
            assert row["what"] in printed and row["shown"] in printed
    names = [result["benchmark"] for result in json.loads((tmp_path / "results.json").read_text())]
    assert sorted(names) == NAMES
    figures = imported(ROOT / "docs", "figures")
    results = figures.read(tmp_path)
    for page in figures.pages():
        before = page.read_text("utf-8")
        after = figures.filled(before, results)
        assert after == figures.filled(after, results)
        outside = [figures.BLOCK.sub("", text) for text in (before, after)]
        assert outside[0] == outside[1]
    pictures = set(figures.PICTURES)
    if importlib.util.find_spec("torch") is None:
        pictures.remove("peers.svg")
    assert all((tmp_path / name).exists() for name in pictures)


def test_pictures_in_another_format(tmp_path):
    run("run_all", "growth", "--quick", "--format", "png", "--out", str(tmp_path))
    assert (tmp_path / "time.png").read_bytes().startswith(b"\x89PNG")


def imported(folder, name):
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


def test_run_all_knows_all():
    assert sorted(imported(BENCHMARKS, "run_all").NAMES) == NAMES
    text = (BENCHMARKS / "README.md").read_text("utf-8")
    assert all(f"`{name}.py`" in text for name in NAMES)
