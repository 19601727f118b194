"""Who may import whom, and what `import linattn` brings along."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import linattn
from linattn.backends import native

SOURCE = Path(linattn.__file__).parent
CORE = {
    "_check",
    "attention",
    "backends",
    "config",
    "feature_maps",
    "fidelity",
    "fronts",
    "plan",
    "reference",
    "state",
}

# Module or package: what of ours it may import. "" is the package itself: the public names.
ALLOWED = {
    "plan": set(),
    "reference": set(),
    "fronts": {"torch"},
    "feature_maps": {"feature_maps", "fronts"},
    "_check": set(),
    "backends": {"backends", "feature_maps"},
    "state": {"plan", "feature_maps", "fronts", "_check", "backends"},
    "attention": {"plan", "feature_maps", "fronts", "_check", "backends", "state"},
    "fidelity": {"plan", "feature_maps", "_check", "attention"},
    "config": {"", "_check", "backends"},
    "__init__": CORE - {"_check", "backends", "fronts", "reference"},
    "__main__": {"cli"},
}
PUBLIC = {"", "feature_maps", "plan", "reference"}  # for front ends and the command line
# A front end is found by the room `fronts`, words no error itself and calls the core.
ALLOWED["torch"] = PUBLIC | {"torch", "_check", "backends", "fronts"}


def files():
    return sorted(p for p in SOURCE.rglob("*.py"))


def room(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported(path):
    """Absolute names of everything a file imports."""
    package = ("linattn", *path.relative_to(SOURCE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{origin}.{alias.name}"
                within = SOURCE.joinpath(*name.split(".")[1:])
                is_module = within.with_suffix(".py").exists() or within.is_dir()
                yield name if origin.startswith("linattn") and is_module else origin


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_direction(path):
    here = room(path)
    ours = {n for n in imported(path) if n.split(".")[0] == "linattn"}
    allowed = ALLOWED.get(here, PUBLIC | {here})
    for name in ours:
        target = [*name.split("."), ""][1]
        if target.startswith("_native"):
            continue
        assert target in allowed, f"{path.name} imports {name}"


@pytest.mark.parametrize(
    "path", [p for p in files() if room(p) in CORE | {"__init__"}], ids=lambda p: p.name
)
def test_core_needs_numpy_alone(path):
    found = {n.split(".")[0] for n in imported(path)} - set(sys.stdlib_module_names)
    # ml_dtypes: asked for where a saved state of bfloat16 is loaded, and there alone
    assert found <= {"numpy", "linattn"} | ({"ml_dtypes"} if path.name == "state.py" else set())


def test_front_ends_need_their_own_library_alone():
    for front in ("torch",):
        for path in (SOURCE / front).rglob("*.py"):
            found = {n.split(".")[0] for n in imported(path)} - set(sys.stdlib_module_names)
            assert found <= {front, "numpy", "linattn"}, path.name


def test_no_module_of_the_core_names_a_library_with_a_front_end():
    """And the front ends themselves are imported in one place, when one is needed."""
    from linattn.fronts import FRONTS

    for path in (p for p in files() if room(p) in CORE | {"__init__"}):
        roots = {n.split(".")[0] for n in imported(path)}
        assert not roots & set(FRONTS), path.name
        ours = {n for n in imported(path) if n in {f"linattn.{library}" for library in FRONTS}}
        assert not ours or path.name == "fronts.py", path.name


def test_a_front_end_is_imported_by_the_first_array_of_its_library():
    """And by nothing before: not by arrays, lists, or a class that is named like the library's."""
    run = python(
        "import sys, types\n"
        "torch = types.ModuleType('torch')\n"
        "class Tensor: __module__ = 'torch'\n"
        "class Mine(Tensor): __module__ = 'mine'\n"
        "class Torchlike: __module__ = 'torchlike'\n"
        "import numpy as np\n"
        "from linattn import fronts, linear_attention\n"
        "x = np.ones((2, 3))\n"
        "linear_attention(x, x.tolist(), x)\n"
        "assert fronts.front(x) is fronts.front([x]) is fronts.front(Torchlike()) is None\n"
        "assert 'linattn.torch' not in sys.modules and 'torch' not in sys.modules\n"
        "front = types.ModuleType('linattn.torch')\n"
        "front.front = front\n"
        "sys.modules['linattn.torch'] = front\n"
        "assert fronts.front(Tensor()) is fronts.front(Mine()) is front\n"
    )
    assert run.returncode == 0, run.stderr


def test_the_array_backend_does_not_name_its_library():
    assert not any(n.startswith("numpy") for n in imported(SOURCE / "backends" / "array.py"))


def python(code, **env):
    import os

    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE.parent), **env},
    )


def test_import_is_silent_and_brings_numpy_alone():
    run = python(
        "import sys, numpy; before = set(sys.modules)\n"
        "import linattn\n"
        "new = {n.split('.')[0] for n in set(sys.modules) - before}\n"
        "print(sorted(n for n in new - set(sys.stdlib_module_names) if n[0] != '_'))"
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    names = set(ast.literal_eval(run.stdout))
    assert "linattn" in names
    assert names <= {"linattn", "numpy", "nanobind_backend"}


WITHOUT = "import sys; sys.modules['linattn._native'] = None\n"


def test_without_the_core_one_notice():
    run = python(
        WITHOUT
        + "import numpy as np, warnings, linattn\n"
        + "x = np.ones((2, 3))\n"
        + "with warnings.catch_warnings(record=True) as seen:\n"
        + "    warnings.simplefilter('always')\n"
        + "    linattn.linear_attention(x, x, x); linattn.linear_attention(x, x, x)\n"
        + "    linattn.State.zeros((), 3, 3).step(x[:1], x[:1], x[:1])\n"
        + "print([(w.category.__name__, 'compiler' in str(w.message)) for w in seen])\n"
        + "print(linattn.show_config().backend, bool(linattn.show_config().remedy))\n",
        LINATTN_REQUIRE_NATIVE="",
        LINATTN_BACKEND="",
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["[('RuntimeWarning', True)]", "array True"]


@pytest.mark.parametrize(
    "env", [{"LINATTN_REQUIRE_NATIVE": "1"}, {"LINATTN_BACKEND": "native"}], ids=str
)
def test_without_the_core_where_it_is_required(env):
    run = python(WITHOUT + "import linattn", **{"LINATTN_REQUIRE_NATIVE": "", **env})
    assert run.returncode == 1
    assert "ImportError" in run.stderr
    assert next(iter(env)) in run.stderr
    assert "compiler" in run.stderr


def test_backend_by_environment():
    run = python("import linattn; print(linattn.show_config().backend)", LINATTN_BACKEND="array")
    assert (run.stdout, run.returncode) == ("array\n", 0)
    run = python("import linattn", LINATTN_BACKEND="gpu")
    assert "LINATTN_BACKEND: expected 'array' or 'native', got 'gpu'" in run.stderr


def test_public_names():
    assert sorted(linattn.__all__) == [
        "FeatureMap",
        "Fidelity",
        "Measured",
        "Plan",
        "State",
        "__version__",
        "feature_maps",
        "fidelity",
        "get_num_threads",
        "linear_attention",
        "plan",
        "set_num_threads",
        "show_config",
        "softmax_attention",
    ]
    for name in linattn.__all__:
        assert getattr(linattn, name).__doc__
    assert linattn.__version__[0].isdigit()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        linattn.nothing  # noqa: B018


def test_show_config_prints_what_is_in_use():
    config = linattn.show_config()
    text = str(config)
    assert config.version in text
    assert config.backend in text
    assert f"threads          {config.threads}" in text
    assert (config.remedy == "") == (native.extension is not None)


def test_num_threads():
    before = linattn.get_num_threads()
    assert before >= 1
    try:
        linattn.set_num_threads(3)
        assert linattn.get_num_threads() == 3
    finally:
        linattn.set_num_threads(before)
    with pytest.raises(ValueError, match="n: expected at least 1, got 0"):
        linattn.set_num_threads(0)
    with pytest.raises(TypeError, match="n: expected an integer, got float"):
        linattn.set_num_threads(2.0)
