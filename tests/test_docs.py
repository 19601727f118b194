"""Every example in docstrings, README and docs/ runs and prints what it says."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import numpy as np
import pytest

import linattn

ROOT = Path(__file__).parents[1]
OPTIONAL = {"dask", "jax", "torch"}  # frameworks whose front ends are skipped where they're missing
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

MODULES = sorted(
    {"linattn"}
    | {
        module.name
        for module in pkgutil.walk_packages(linattn.__path__, "linattn.", lambda _: None)
    }
    - {"linattn._native"}
)
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "```python" in page.read_text("utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in OPTIONAL:
            raise
        pytest.skip(f"needs {error.name}")
    failed, _ = doctest.testmod(module, optionflags=FLAGS)
    assert not failed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page, tmp_path, monkeypatch):
    """A page's ```python blocks in their order, as one session; one with >>> is checked."""
    text = page.read_text("utf-8")
    needed = set(re.findall(r"^\s*(?:>>> )?(?:import|from) (\w+)", text, re.MULTILINE))
    for framework in sorted(needed & OPTIONAL):
        pytest.importorskip(framework)
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__", "np": np}
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, block.start()) + 1
        if ">>>" in block[1]:
            example = doctest.DocTestParser().get_doctest(
                block[1], names, page.name, str(page), line
            )
            runner.run(example, clear_globs=False)
            names.update(example.globs)
        else:
            exec(compile("\n" * line + block[1], str(page), "exec"), names)
    assert not runner.failures
