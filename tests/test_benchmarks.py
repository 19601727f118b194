"""Every benchmark runs; no time is judged here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
NAMES = sorted(
    path.stem for path in BENCHMARKS.glob("[!_]*.py") if path.stem not in ("run_all", "__init__")
)


def run(name, *arguments):
    command = [sys.executable, "-W", "error", str(BENCHMARKS / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_runs(name, tmp_path):
    answer = tmp_path / "answer.json"
    printed = run(name, "--quick", "--json", str(answer))
    assert "targets reached" in printed
    result = json.loads(answer.read_text("utf-8"))
    assert result["benchmark"] == name
    assert result["machine"]["matmul_rate"] > 0 and result["machine"]["copy_rate"] > 0
    assert result["rows"] or "skipped" in printed
    for row in result["rows"]:
        assert row["low"] <= row["value"] <= row["high"]
        assert row["reached"] is None  # tiny sizes say nothing
        assert row["what"] in printed and row["shown"] in printed


def test_run_all_writes_table_and_pictures(tmp_path):
    printed = run(
        "run_all", "growth", "length_error", "--quick", "--format", "png", "--out", str(tmp_path)
    )
    assert "0 of 0 targets" in printed
    text = (tmp_path / "results.md").read_text("utf-8")
    assert "## growth" in text and "## length_error" in text
    names = [result["benchmark"] for result in json.loads((tmp_path / "results.json").read_text())]
    assert names == ["growth", "length_error"]
    for picture in ("time.png", "error.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_run_all_knows_all():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import run_all
    finally:
        sys.path.remove(str(BENCHMARKS))
    assert sorted(run_all.NAMES) == NAMES
    text = (BENCHMARKS / "README.md").read_text("utf-8")
    assert all(f"`{name}.py`" in text for name in NAMES)
