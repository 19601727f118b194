"""Every example in docstrings, README and docs/ runs and prints what it says.

Blocks of a page run in their order, as one session in one empty folder:

- `python`: a script;
- `pycon`: lines with >>>, whose output is compared;
- `console`: shell lines with $, whose output is compared.

In what is compared, `...` stands for anything and all white space is alike. Blocks of another kind,
such as `text`, don't run.
"""

import doctest
import importlib.util
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import linattn

ROOT = Path(__file__).parents[1]
OPTIONAL = {"dask", "jax", "torch"}  # frameworks whose front ends are skipped where they're missing
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
KINDS = {"python", "pycon", "console"}, {"cpp", "sh", "text"}  # that run, that don't

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
    if re.search(r"^```(?:python|pycon|console)$", page.read_text("utf-8"), re.MULTILINE)
]


def relative(page):
    return str(page.relative_to(ROOT))


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


def blocks(page):
    """Kind, text and line of the fenced blocks of a page."""
    text = page.read_text("utf-8")
    found = [
        (block[1], block[2], text.count("\n", 0, block.start()) + 1)
        for block in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]
    # Indented fences, in a list or an admonition, would be passed over.
    assert 2 * len(found) == len(re.findall(r"^\s*```", text, re.MULTILINE)), relative(page)
    return found


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_page(page, tmp_path, monkeypatch, capsys):
    found = blocks(page)
    needed = set(
        re.findall(
            r"^(?:>>> )?(?:import|from) (\w+)",
            "".join(text for kind, text, _ in found if kind in KINDS[0]),
            re.MULTILINE,
        )
    )
    for framework in sorted(needed & OPTIONAL):
        pytest.importorskip(framework)
    if os.name == "nt" and any(kind == "console" for kind, _, _ in found):
        pytest.skip("its commands are for a POSIX shell")
    monkeypatch.chdir(tmp_path)
    threads = linattn.get_num_threads()
    names = {"__name__": "__main__", "np": np}
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    try:
        for kind, text, line in found:
            assert kind in KINDS[0] | KINDS[1], f"{page.name}, line {line}: {kind or 'no kind'}"
            if kind == "python":
                assert ">>>" not in text, f"{page.name}, line {line}: a session is `pycon`"
                exec(compile("\n" * line + text, str(page), "exec"), names)
            elif kind == "pycon":
                example = doctest.DocTestParser().get_doctest(
                    text, names, page.name, str(page), line
                )
                assert example.examples, f"{page.name}, line {line}: no >>>"
                runner.run(example, clear_globs=False)
                names.update(example.globs)
            elif kind == "console":
                check_commands(text, f"{page.name}, line {line}")
    finally:
        linattn.set_num_threads(threads)
    assert not runner.failures, capsys.readouterr().out


def check_commands(text, where):
    """Each line that starts with $, and what it prints up to the next one."""
    assert text.startswith("$ "), f"{where}: no $"
    env = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "COLUMNS": "80",
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "2",  # plans name memory for each thread
        "PYTHONIOENCODING": "utf-8",
    }
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, wanted = part.partition("\n")
        run = subprocess.run(
            command, shell=True, env=env, encoding="utf-8", timeout=300,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert run.returncode == 0, f"{where}: {command}\n{run.stdout}"
        assert doctest.OutputChecker().check_output(wanted, run.stdout, FLAGS), (
            f"{where}: {command}\n-- expected\n{wanted}\n-- got\n{run.stdout}"
        )


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links(page):
    """What a page links to in this repository is there, headings included."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            assert "arxiv.org/abs/" in target, f"{relative(page)}: {target}"
            continue
        path, _, heading = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{relative(page)}: {target}"
        if heading and linked.suffix == ".md" and linked.name != "reference.md":
            titles = re.findall(r"^#+ (.*)$", linked.read_text("utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", t).strip().lower().replace(" ", "-") for t in titles}
            assert heading in slugs, f"{relative(page)}: {target}"


def test_site_has_every_page():
    """Each page stands in the site's navigation, and each entry is a page."""
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    listed = re.findall(r"^ +- (?:[^:\n]+: )?(\S+\.md)$", text, re.MULTILINE)
    docs = ROOT / "docs"
    assert sorted(listed) == sorted(p.relative_to(docs).as_posix() for p in docs.rglob("*.md"))


def test_command_line_page_has_every_option():
    pytest.importorskip("typer")
    import typer

    from linattn.cli._app import app

    text = (ROOT / "docs" / "command-line.md").read_text("utf-8")
    for name, command in typer.main.get_command(app).commands.items():
        section = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)[1]
        for option in (o for p in command.params for o in p.opts if o.startswith("-")):
            assert f"`{option}`" in section or option == "--help", f"{name} {option}"


def figures():
    """docs/figures.py as a module."""
    spec = importlib.util.spec_from_file_location("figures", ROOT / "docs" / "figures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_figures_have_their_places():
    module = figures()
    pages = module.pages()
    assert {"README.md", "docs/performance.md"} <= set(map(relative, pages))
    for page in pages:
        text = page.read_text("utf-8")
        found = list(module.BLOCK.finditer(text))
        assert len(found) == text.count("<!-- figures: ") == text.count("<!-- end -->")
        assert all(block[2] in module.MAKERS and block[4].strip() for block in found)
    for name in module.PICTURES:
        assert (ROOT / "docs" / "assets" / name).read_text("utf-8").lstrip().startswith("<?xml")
