"""The command line: right numbers, whole files, and one line for whatever goes wrong."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from cases import close, definition, normal

import linattn
from linattn import State, linear_attention
from linattn.cli import _files, _measure, attend, main
from linattn.cli._failure import Failure

Array = Any

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test works in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def good(capsys: Any, *arguments: object) -> str:
    """Runs a command that has to succeed, and say nothing on stderr; returns what it prints."""
    status = main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    return str(out)


def bad(capsys: Any, *arguments: object, status: int = 1) -> str:
    """Runs a command that has to fail, with one line on stderr; returns it."""
    before = sorted(os.listdir())
    found = main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    assert found == status, err
    assert out == ""
    assert err.endswith("\n") and err.count("\n") == 1, err
    assert err.startswith("linattn"), err
    assert "Traceback" not in err
    assert sorted(os.listdir()) == before, "a file was left behind"
    return str(err)


def python(code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    source = str(Path(linattn.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": source, **options.pop("env", {})}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, env=env, **options,
    )  # fmt: skip


RUN = "import sys; from linattn.cli import main; sys.exit(main())"


def save_npy(q: Array, k: Array, v: Array) -> list[str]:
    for name, x in (("q", q), ("k", k), ("v", v)):
        np.save(f"{name}.npy", x)
    return ["q.npy", "k.npy", "v.npy"]


def save_fortran(q: Array, k: Array, v: Array) -> list[str]:
    return save_npy(*(np.asfortranarray(x) for x in (q, k, v)))


def save_npz(q: Array, k: Array, v: Array) -> list[str]:
    np.savez("all.npz", q=q, k=k, v=v)
    return ["all.npz"]


def save_npz_compressed(q: Array, k: Array, v: Array) -> list[str]:
    np.savez_compressed("all.npz", Q=q, K=k, V=v, other=np.arange(3))
    return ["all.npz"]


def save_safetensors(q: Array, k: Array, v: Array) -> list[str]:
    safetensors.numpy.save_file({"q": q, "k": k, "v": v}, "all.safetensors", {"about": "a test"})
    return ["all.safetensors"]


def save_parts(q: Array, k: Array, v: Array) -> list[str]:
    """Each from another format, by names that have to be asked for."""
    np.save("q.npy", q)
    np.savez("some.npz", key=k, other=q)
    safetensors.numpy.save_file({"layer.0.v": v, "odd": v[..., :2, :].copy()}, "w.safetensors")
    return ["q.npy", "some.npz:key", "w.safetensors:layer.0.v"]


SAVERS = [save_npy, save_fortran, save_npz, save_npz_compressed, save_safetensors, save_parts]


def load(path: str) -> Array:
    if path.endswith(".safetensors"):
        return safetensors.numpy.load_file(path)["out"]
    found = np.load(path)
    return found["out"] if path.endswith(".npz") else found


def same(a: Array, b: Array) -> None:
    """Equal but for the rounding of sums in another grouping, in float64."""
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


# ------------------------------------------------------------------------------ attend: numbers


@pytest.mark.parametrize("output", ["out.npy", "out.npz", "out.safetensors"])
@pytest.mark.parametrize("save", SAVERS, ids=lambda save: save.__name__)
def test_every_format(save: Any, output: str, capsys: Any) -> None:
    q, k, v = normal(1, 2, 3, 131, 17, dtype="f4"), normal(2, 3, 131, 17, dtype="f4"), None
    v = normal(3, 3, 131, 19, dtype="f4")
    text = good(capsys, "attend", *save(q, k, v), "-o", output)
    assert "(2, 3, 131, 19) float32" in text
    out = load(output)
    assert out.dtype == np.float32
    close(out, *definition(q, k, v, "elu1"))


@pytest.mark.parametrize("block", [None, 1, 64, 1000])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["elu1", "exp"])
def test_blocks(name: str, causal: bool, block: int | None, capsys: Any) -> None:
    n = 67 if block == 1 else 257
    q, k, v = (normal(i, 2, n, d) for i, d in ((1, 7), (2, 7), (3, 5)))
    mask = np.random.default_rng(4).random((2, n)) < 0.7
    mask[:, 0] = True
    np.save("mask.npy", mask)
    options = ["--feature-map", name, "--eps", "0.25", "--key-mask", "mask.npy"]
    options += ["--causal"] * causal + ([] if block is None else ["--block", block])
    good(capsys, "attend", *save_npy(q, k, v), "-o", "out.npy", *options)
    close(np.load("out.npy"), *definition(q, k, v, name, eps=0.25, causal=causal, key_mask=mask))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "dtypes", [("bfloat16",) * 3, ("float16",) * 3, ("float32", "float64", "float16"), (">f4",) * 3]
)
def test_dtypes(dtypes: tuple[str, ...], causal: bool, capsys: Any) -> None:
    kinds = [BFLOAT16 if d == "bfloat16" else np.dtype(d) for d in dtypes]
    q, k, v = (normal(i, 3, 67, 5, dtype=kind) for i, kind in enumerate(kinds))
    if BFLOAT16 in kinds:
        files = save_safetensors(q, k, v)
    else:
        files = save_npy(q, k, v)
    options = ["--causal"] * causal
    good(capsys, "attend", *files, "-o", "out.safetensors", "--block", 13, *options)
    out = load("out.safetensors")
    assert out.dtype == linear_attention(q, k, v).dtype
    close(out, *definition(q, k, v, "elu1", causal=causal))


def test_bfloat16_has_no_npy(capsys: Any) -> None:
    files = save_safetensors(*(normal(i, 5, 3, dtype=BFLOAT16) for i in range(3)))
    assert "NumPy's formats have no bfloat16; choose a name ending in .safetensors" in bad(
        capsys, "attend", *files, "-o", "out.npy"
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("lead_q", "lead_k", "lead_v"),
    [
        ((), (), ()),
        ((1,), (3,), (3,)),
        ((2, 3), (3,), (2, 1)),
        ((5, 2, 3), (1, 1, 3), (1, 2, 1)),
        ((2, 3), (1,), ()),
        ((2, 0), (2, 0), (2, 0)),
    ],
)
def test_batches_in_slabs(
    lead_q: Any, lead_k: Any, lead_v: Any, causal: bool, capsys: Any, monkeypatch: Any
) -> None:
    """States of one element at a time, or of all: the same numbers, and the same state."""
    q, k, v = (
        normal(1, *lead_q, 31, 3),
        normal(2, *lead_k, 31, 3),
        normal(3, *lead_v, 31, 2),
    )
    past = State.of(normal(4, *lead_k, 7, 3), normal(5, *lead_k, 7, 2))
    past.save("past.npz")
    np.save("mask.npy", np.arange(31) % 3 > 0)
    files = save_npy(q, k, v)
    expected, state = linear_attention(
        q, k, v, causal=causal, state=past, return_state=True, key_mask=np.arange(31) % 3 > 0
    )
    each = 8 * 3 * 3
    for states, block in ((1, 11), (each, 1000), (2 * each, 11), (4 * each, 40), (1 << 20, 11)):
        monkeypatch.setattr(attend, "STATES", states)
        good(
            capsys, "attend", *files, "-o", "out.npy", *["--causal"] * causal, "--block", block,
            "--key-mask", "mask.npy", "--state-in", "past.npz", "--state-out", "now.npz",
        )  # fmt: skip
        same(np.load("out.npy"), expected)
        now = State.load("now.npz")
        same(now.kv, state.kv)
        same(now.k_sum, state.k_sum)


@pytest.mark.parametrize("causal", [False, True])
def test_grouped_heads(causal: bool, capsys: Any) -> None:
    q, k, v = normal(1, 2, 6, 67, 5), normal(2, 2, 3, 67, 5), normal(3, 2, 3, 67, 7)
    mask = np.random.default_rng(4).random((2, 1, 67)) < 0.7
    mask[..., 0] = True
    np.save("mask.npy", mask)
    past = State.of(normal(4, 2, 3, 11, 5), normal(5, 2, 3, 11, 7), "exp")
    past.save("past.npz")
    good(
        capsys, "attend", *save_npy(q, k, v), "-o", "out.npy", "--gqa", *["--causal"] * causal,
        "--key-mask", "mask.npy", "--state-in", "past.npz", "--state-out", "now.npz", "--block", 13,
    )  # fmt: skip
    expected, state = linear_attention(
        q, k, v, "exp", causal=causal, key_mask=mask, enable_gqa=True, state=past, return_state=True
    )
    same(np.load("out.npy"), expected)
    probe = normal(6, 2, 6, 3, 5)
    now = State.load("now.npz")
    same(now.query(probe, enable_gqa=True), state.query(probe, enable_gqa=True))


@pytest.mark.parametrize("name", ["elu1", "exp"])
def test_a_sequence_in_two_files(name: str, capsys: Any) -> None:
    """The state carries from one run to the next, and remembers its map."""
    q, k, v = (normal(i, 2, 101, 5) for i in range(3))
    files = save_npy(*(x[:, :37] for x in (q, k, v)))
    good(
        capsys, "attend", *files, "-o", "first.npy", "--causal", "--feature-map", name,
        "--state-out", "state.npz",
    )  # fmt: skip
    files = save_npy(*(x[:, 37:] for x in (q, k, v)))
    text = good(
        capsys, "attend", *files, "-o", "second.npy", "--causal", "--state-in", "state.npz",
        "--state-out", "all.npz", "--threads", linattn.get_num_threads(),
    )  # fmt: skip
    assert "all.npz: the state of 64 keys more" in text
    out = np.concatenate([np.load("first.npy"), np.load("second.npy")], axis=-2)
    close(out, *definition(q, k, v, name, causal=True))
    same(State.load("all.npz").query(q), State.of(k, v, name).query(q))


def test_no_positions(capsys: Any) -> None:
    files = save_npy(np.ones((2, 0, 3)), np.ones((2, 5, 3)), np.ones((2, 5, 4)))
    good(capsys, "attend", *files, "-o", "out.npy")
    assert np.load("out.npy").shape == (2, 0, 4)
    files = save_npy(np.ones((2, 3, 3)), np.ones((2, 0, 3)), np.ones((2, 0, 4)))
    good(capsys, "attend", *files, "-o", "out.safetensors")
    assert (load("out.safetensors") == np.zeros((2, 3, 4))).all()


def test_quiet_and_version(capsys: Any) -> None:
    files = save_npy(*(normal(i, 5, 3) for i in range(3)))
    assert good(capsys, "attend", *files, "-o", "out.npy", "--quiet") == ""
    assert good(capsys, "--version") == f"linattn {linattn.__version__}\n"
    run = python("import runpy; runpy.run_module('linattn', run_name='__main__')", "--version")
    assert run.returncode == 0


def test_files_are_named_as_they_were_given(capsys: Any) -> None:
    files = save_npy(*(normal(i, 5, 3) for i in range(3)))
    os.mkdir("there")
    Path("there/link.npz").symlink_to("state.npz")
    text = good(capsys, "attend", *files, "-o", "./there/out.npy", "--state-out", "there/link.npz")
    assert [line.partition(":")[0] for line in text.splitlines()] == [
        "./there/out.npy",
        "there/link.npz",
    ]
    assert sorted(os.listdir("there")) == ["link.npz", "out.npy", "state.npz"]
    State.load("there/state.npz")


def test_output_replaces_what_was_there(capsys: Any) -> None:
    files = save_npy(*(normal(i, 5, 3) for i in range(3)))
    Path("real.npy").write_text("old")
    os.chmod("real.npy", 0o600)
    Path("out.npy").symlink_to("real.npy")
    good(capsys, "attend", *files, "-o", "out.npy")
    assert Path("out.npy").is_symlink()
    assert np.load("real.npy").shape == (5, 3)
    mask = os.umask(0)
    os.umask(mask)
    assert Path("real.npy").stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_files_larger_than_what_is_used_of_memory() -> None:
    """256 MiB in and 64 MiB out; the peak of the process stays far below."""
    n = 1 << 19
    for name, width in (("q", 32), ("k", 32), ("v", 64)):
        header = np.lib.format.open_memmap(f"{name}.npy", "w+", "f4", (n, width))
        header[1], header[-1] = 0.5, 2.0
        del header
    code = (
        "import sys; from linattn.cli import main; code = main()\n"
        "print(*(line for line in open('/proc/self/status') if line.startswith('VmHWM')))\n"
        "sys.exit(code)"
    )
    run = python(code, "attend", "q.npy", "k.npy", "v.npy", "-o", "out.npy")
    assert run.returncode == 0, run.stderr
    peak = re.search(r"VmHWM:\s+(\d+) kB", run.stdout)
    assert peak is not None
    assert int(peak[1]) / 1024 < 200
    out = np.load("out.npy", mmap_mode="r")
    assert out.shape == (n, 64)
    # Two rows of V are not 0: phi(q) . phi(k) is 32 among zeros, 32 * 1.5 for k = 0.5, ...
    weights = 32 * (n - 2) + 32 * 1.5 + 32 * 3.0
    close(out[:1], np.full((1, 64), (48 * 0.5 + 96 * 2.0) / weights), np.full((1, 64), 1e-3))


# -------------------------------------------------------------------------- attend: what is wrong


@pytest.fixture
def files() -> list[str]:
    return save_npy(*(normal(i, 2, 11, d, dtype="f4") for i, d in enumerate((3, 3, 5))))


def test_missing_and_foreign_files(files: list[str], capsys: Any) -> None:
    attend = ("attend", "q.npy", "k.npy")
    assert "nope.npy: No such file" in bad(capsys, *attend, "nope.npy", "-o", "out.npy")
    assert "No such file" in bad(capsys, *attend, "nope.npz:v", "-o", "out.npy")
    Path("folder").mkdir()
    assert "expected a file, got a folder" in bad(capsys, *attend, "folder", "-o", "out.npy")
    assert "got a device" in bad(capsys, *attend, "/dev/null", "-o", "out.npy")
    Path("v.txt").write_text("1 2 3")
    assert "expected a .npy, .npz or .safetensors file" in bad(
        capsys, *attend, "v.txt", "-o", "out.npy"
    )
    Path("empty.npy").touch()
    assert "not a .npy file, or a damaged one" in bad(capsys, *attend, "empty.npy", "-o", "out.npy")
    assert "no members" in bad(capsys, *attend, "v.npy:v", "-o", "out.npy")
    assert "one .npy file holds one array" in bad(capsys, "attend", "q.npy", "-o", "out.npy")
    assert "expected 3 files (q, k, v), or one .npz" in bad(
        capsys, *attend, "-o", "out.npy", status=2
    )
    np.savez("some.npz", a=np.ones((2, 2)), b=np.ones((2, 2)))
    assert "no array named 'v'; it holds 'a', 'b'; choose one as some.npz:NAME" in bad(
        capsys, *attend, "some.npz", "-o", "out.npy"
    )
    assert "no array named 'c'; it holds 'a', 'b'" in bad(
        capsys, *attend, "some.npz:c", "-o", "out.npy"
    )


def test_shapes_and_dtypes(files: list[str], capsys: Any) -> None:
    def run(*options: object, **changed: Array) -> str:
        for name, x in changed.items():
            np.save(f"{name}2.npy", x)
        chosen = [f"{n}2.npy" if n in changed else f"{n}.npy" for n in ("q", "k", "v")]
        return bad(capsys, "attend", *chosen, "-o", "out.npy", *options)

    text = run(k=np.ones((2, 11, 4), "f4"))
    assert "q (q.npy): expected as many features as k" in text
    assert "got q (2, 11, 3) and k (2, 11, 4)" in text  # the sizes in the files
    text = run(v=np.ones((2, 13, 5), "f4"))
    assert "v (v2.npy): expected one row for each key" in text
    assert "11 and 13 positions" in text
    assert "axis -1 has 2 in k, 3 in v" in run(v=np.ones((3, 11, 5), "f4"))
    assert "at least 2 axes" in run(q=np.ones(3, "f4"))
    assert "q (q2.npy): expected dtype" in run(q=np.ones((2, 11, 3), int))
    assert "complex" in run(q=np.ones((2, 11, 3), complex))
    assert "holds Python objects" in run(q=np.array([[None]]))
    assert "--causal: expected q and k of equal length, got 7 positions in q2.npy" in run(
        "--causal", q=np.ones((2, 7, 3), "f4")
    )
    np.save("mask.npy", np.ones((2, 12), bool))
    assert "key_mask (mask.npy): expected one entry for each of 11 keys" in run(
        "--key-mask", "mask.npy"
    )
    np.save("mask.npy", np.ones((2, 11), np.uint8))
    assert "key_mask (mask.npy): expected a boolean array" in run("--key-mask", "mask.npy")
    np.save("mask.npy", np.ones((3, 11), bool))
    assert "for k of shape (2, 11, 3), got (3, 11)" in run("--key-mask", "mask.npy")
    assert "No such file" in run("--key-mask", "nope.npy")
    assert "--gqa: expected query heads to be a multiple" in run(
        "--gqa", q=np.ones((3, 11, 3), "f4")
    )
    assert "or set --gqa if k and v have fewer heads" in run(q=np.ones((4, 11, 3), "f4"))


def test_options(files: list[str], capsys: Any) -> None:
    def run(*options: object, status: int = 1, output: str = "out.npy") -> str:
        return bad(capsys, "attend", *files, "-o", output, *options, status=status)

    assert " --eps: expected a finite number >= 0, got nan" in run("--eps", "nan")
    assert "eps: expected a finite number >= 0, got -1.0" in run("--eps=-1")
    assert "'--eps'" in run("--eps", "little", status=2)
    assert " --feature-map: expected one of 'elu1'" in run("--feature-map", "elu2")
    assert "a map that doesn't depend on positions" in run("--feature-map", "cosformer(length=11)")
    assert "--block" in run("--block", "0", status=2)
    assert "--threads" in run("--threads", "0", status=2)
    assert "No such option: --blok" in run("--blok", "3", status=2)
    assert "expected a name that ends in .npy, .npz or .safetensors" in run(output="out.txt")
    assert "there is no folder" in run(output="nowhere/out.npy")
    Path("folder.npy").mkdir()
    assert "exists and is no regular file" in run(output="folder.npy")
    assert "--state-out" in run("--state-out", "state.npy")
    assert "Missing option '--output' / '-o'" in bad(capsys, "attend", *files, status=2)
    assert "No such command 'atend'" in bad(capsys, "atend", status=2)


def test_states_that_do_not_fit(files: list[str], capsys: Any) -> None:
    def run(state: State | None, *options: str) -> str:
        if state is not None:
            state.save("past.npz")
        return bad(capsys, "attend", *files, "-o", "out.npy", "--state-in", "past.npz", *options)

    assert "past.npz: No such file" in run(None)
    assert "expected 'exp', the map of this state, got 'elu1'" in run(
        State.zeros(2, 3, 5, "exp"), "--feature-map", "elu1"
    )
    assert "--state-in: expected D = 3 features" in run(State.zeros(2, 4, 5))
    assert "d_v = 6" in run(State.zeros(2, 3, 6))
    assert "2 in k, 2 in v, 3 in state" in run(State.zeros(3, 3, 5))
    assert "map of this state" in run(State.zeros(2, 3, 5, lambda x: x))
    Path("past.npz").write_bytes(b"PK\x03\x04 and no more")
    assert "--state-in past.npz: " in run(None)
    np.save("past.npy", np.ones(3))
    Path("past.npy").rename("past.npz")
    text = run(None)
    assert "--state-in past.npz: expected a file that State.save wrote" in text
    assert "it holds no 'about'" in text


def test_output_that_is_an_input(files: list[str], capsys: Any) -> None:
    before = {name: Path(name).read_bytes() for name in files}
    Path("link.npy").symlink_to("k.npy")
    os.link("v.npy", "hard.npy")
    np.save("mask.npy", np.ones(11, bool))
    np.savez("all.npz", q=np.ones((2, 2)), k=np.ones((2, 2)), v=np.ones((2, 2)))
    State.zeros(2, 3, 5).save("past.npz")
    for output, name in (
        ("q.npy", "Q"),
        ("./k.npy", "K"),
        ("link.npy", "K"),
        ("hard.npy", "V"),
        ("mask.npy", "--key-mask"),
        ("past.npz", "--state-in"),
    ):
        text = bad(
            capsys, "attend", *files, "-o", output, "--key-mask", "mask.npy",
            "--state-in", "past.npz",
        )  # fmt: skip
        assert f"is the same file as {name};" in text
    assert "is the same file as the input" in bad(capsys, "attend", "all.npz", "-o", "all.npz")
    parts = ("all.npz:q", "all.npz:k", "all.npz:v")
    assert "is the same file as Q" in bad(capsys, "attend", *parts, "-o", "all.npz")
    for state, name in (("past.npz", "--state-in"), ("out.npz", "-o")):
        text = bad(
            capsys, "attend", *files, "-o", "out.npz", "--state-in", "past.npz",
            "--state-out", state,
        )  # fmt: skip
        assert f"--state-out {state}: is the same file as {name};" in text
    assert {name: Path(name).read_bytes() for name in files} == before


@pytest.mark.parametrize("save", [save_npy, save_npz, save_npz_compressed, save_safetensors])
def test_damaged_files(save: Any, capsys: Any) -> None:
    """Bytes changed and ends cut off: the right numbers, or one line; and nothing else."""
    files = save(*(normal(i, 2, 5, 3, dtype="f4") for i in range(3)))
    broken = files[-1]
    whole = Path(broken).read_bytes()
    choose = random.Random(5)
    failed = 0
    for attempt in range(150):
        data = bytearray(whole)
        if attempt % 3 == 0:
            data = data[: choose.randrange(len(data))]
        else:
            for _ in range(choose.choice((1, 2, 20))):
                at = choose.randrange(choose.choice((16, 130, len(data))))
                data[at] = choose.randrange(256)
        Path(broken).write_bytes(data)
        if attempt % 20 == 1:
            status = main(["attend", *files, "-o", "out.npy", "-q"])
            out, err = capsys.readouterr()
            assert (status, out) in ((0, ""), (1, "")), err
            assert err.count("\n") == status, err
            assert "fault of linattn" not in err
            assert Path("out.npy").exists() == (status == 0)
            Path("out.npy").unlink(missing_ok=True)
        try:
            for found in _files.inputs(files, ("q", "k", "v"), "."):
                found.array.tobytes()  # all of it can be read
        except Failure:
            failed += 1
    assert failed > 50
    assert not [name for name in os.listdir() if name.endswith(".part")]


def test_files_cut_short(files: list[str], capsys: Any) -> None:
    data = Path("v.npy").read_bytes()
    Path("v.npy").write_bytes(data[:-1])
    text = bad(capsys, "attend", *files, "-o", "out.npy")
    assert f"v.npy: cut short: {len(data)} bytes expected, {len(data) - 1} there" in text


def test_damaged_numbers_in_an_npz(capsys: Any) -> None:
    """Its check sums are not passed over because the file is mapped."""
    (file,) = save_npz(*(np.ones((50, 3)) for _ in range(3)))
    data = bytearray(Path(file).read_bytes())
    data[300] ^= 1
    Path(file).write_bytes(data)
    assert "Bad CRC-32" in bad(capsys, "attend", file, "-o", "out.npy")


def test_encrypted_or_odd_archives(capsys: Any) -> None:
    with zipfile.ZipFile("all.npz", "w") as archive:
        for name in "qkv":
            archive.writestr(f"{name}.npy", b"no array")
    assert "all.npz: damaged, or not what its name says" in bad(
        capsys, "attend", "all.npz", "-o", "out.npy"
    )
    safetensors.numpy.save_file({"q": np.ones((2, 2), np.int8)}, "all.safetensors")
    data = Path("all.safetensors").read_bytes().replace(b'"I8"', b'"F8_E4M3"'[:4])
    Path("all.safetensors").write_bytes(data)
    assert "all.safetensors: damaged" in bad(capsys, "attend", "all.safetensors", "-o", "out.npy")


# ------------------------------------------------------------ attend: full disks and interruptions


@pytest.mark.parametrize("output", ["out.npy", "out.npz", "out.safetensors"])
def test_full_disk(output: str, files: list[str]) -> None:
    """A limit on the size of files stands for the full disk: what was there stays."""
    resource = pytest.importorskip("resource")
    Path(output).write_text("old")
    run = python(
        RUN, "attend", *files, "-o", output,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300)),
    )  # fmt: skip
    assert run.returncode == 1
    assert run.stderr.count("\n") == 1
    assert f"{output}: File too large (440 B to write); nothing was written" in run.stderr
    assert Path(output).read_text() == "old"
    assert sorted(os.listdir()) == sorted([*files, output])


def test_disk_that_fills_on_the_way(files: list[str], capsys: Any, monkeypatch: Any) -> None:
    """Where space cannot be reserved, the write that fails is the one that says so."""

    def unsupported(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    good(capsys, "attend", *files, "-o", "out.npy")
    before = Path("out.npy").read_bytes()
    for name, function in (("posix_fallocate", full), ("fsync", full), ("replace", full)):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, function)
            text = bad(capsys, "attend", *files, "-o", "out.npy")
        assert "No space left on device" in text
    put = _files.Output._put

    def put_until_full(self: Any, offset: int, data: Any) -> None:
        if offset > 200:
            full()
        put(self, offset, data)

    monkeypatch.setattr(_files.Output, "_put", put_until_full)
    text = bad(capsys, "attend", *files, "-o", "out.npy", "--block", 2)
    assert "No space left on device (440 B to write); nothing was written" in text
    monkeypatch.setattr(_files.Output, "_put", put)
    monkeypatch.setattr(State, "save", full)
    text = bad(capsys, "attend", *files, "-o", "out.npy", "--state-out", "state.npz")
    assert "--state-out" in text and "No space left on device" in text
    assert Path("out.npy").read_bytes() == before


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"]
)
@pytest.mark.parametrize("causal", [[], ["--causal"]], ids=["full", "causal"])
def test_interrupt(number: int, status: int, causal: list[str]) -> None:
    """Where the work is stopped, the file that was there stays, and no other."""
    for name in "qkv":
        np.lib.format.open_memmap(f"{name}.npy", "w+", "f4", (300_000, 4)).flush()
    Path("out.npy").write_text("old")
    source = str(Path(linattn.__file__).parents[1])
    # A shell starts what runs in its background with SIGINT ignored, and that is inherited: tests
    # run there would start a process that is right not to listen.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", RUN, "attend", "q.npy", "k.npy", "v.npy", "-o", "out.npy",
             "--block", "1", *causal],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": source},
        )  # fmt: skip
    finally:
        signal.signal(number, before)
    with process:
        try:
            end = time.monotonic() + 30
            while not any(name.endswith(".part") for name in os.listdir()):
                assert process.poll() is None and time.monotonic() < end
                time.sleep(0.01)
            time.sleep(0.05)
            process.send_signal(number)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()  # or what it left open would fail the tests behind this one
    assert (process.returncode, out) == (status, "")
    assert err == "linattn attend: interrupted; out.npy was not written\n"
    assert Path("out.npy").read_text() == "old"
    assert sorted(os.listdir()) == ["k.npy", "out.npy", "q.npy", "v.npy"]


def test_unexpected_errors_are_one_line_too(capsys: Any, monkeypatch: Any) -> None:
    files = save_npy(*(np.ones((2, 2)) for _ in range(3)))

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(attend._Job, "run", broken)
    text = bad(capsys, "attend", *files, "-o", "out.npy")
    assert "unexpected ZeroDivisionError: on purpose (this is a fault of linattn" in text
    monkeypatch.setenv("LINATTN_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        main(["attend", *files, "-o", "out.npy"])


def test_a_reader_that_has_gone() -> None:
    command = f"{sys.executable} -c '{RUN}' info | true; exit ${{PIPESTATUS[0]}}"
    source = str(Path(linattn.__file__).parents[1])
    run = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": source},
    )  # fmt: skip
    assert run.stderr == ""
    assert run.returncode in (0, 1)  # 0: it was quicker than the reader


def test_progress_bar(files: list[str]) -> None:
    """On a terminal there is a bar, and it is gone at the end."""
    pty = pytest.importorskip("pty")
    parent, child = pty.openpty()
    source = str(Path(linattn.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, "attend", *files, "-o", "out.npy"],
        stdout=subprocess.PIPE, stderr=child, text=True,
        env={**os.environ, "PYTHONPATH": source, "TERM": "xterm"},
    )  # fmt: skip
    os.close(child)
    seen = b""
    with pytest.raises(OSError):  # how the end of a terminal's output shows
        while True:
            seen += os.read(parent, 4096)
            if not seen or process.poll() is not None:
                os.set_blocking(parent, False)
    os.close(parent)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert b"attend" in seen and b"100%" in seen


# ------------------------------------------------------------------------------ the other commands


def test_demo(capsys: Any) -> None:
    text = good(capsys, "demo", "--longest", 32, "--plot", "picture.png")
    for piece in (
        "S = φ(K)ᵀV   (64, 64)",
        "a 64 × 64 aggregate of 4,096 numbers",
        "a 128 × 128 matrix of 16,384 numbers, 4.0x as many",
        "no dearer from n = 64",
        "the definition in float64",
        "the quadratic order",
        "grows as",
        "Peak memory beyond inputs and output",
    ):
        assert piece in text
    for row in (
        r"128 +4,096 +16,384 +4\.0x +2,097,152 +4,194,304",
        r"1,024 +4,096 +1,048,576 +256\.0x",
        r"8,192 +4,096 +67,108,864 +16,384\.0x",
        r"10,000 +4,096 +100,000,000 +24,414\.1x",
    ):
        assert re.search(row, text)
    assert text.count(" ok") == 2
    assert len(re.findall(r"[Ff]aster than", text)) == 3
    assert Path("picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def hasty(monkeypatch: Any) -> None:
    """Measurements that are no use, but quick."""
    monkeypatch.setattr(_measure, "seconds", lambda call, budget: _measure.duration(call))
    monkeypatch.setattr(_measure, "rest", lambda: None)
    monkeypatch.setattr(_measure, "matmul_rate", lambda: 1e11)
    monkeypatch.setattr(_measure, "extra_memory", lambda *_: 1 << 20)


def test_demo_of_given_arrays(hasty: None, capsys: Any) -> None:
    q, k, v = normal(1, 2, 3000, 5), normal(2, 2, 2111, 5), normal(3, 1, 2111, 7)
    text = good(
        capsys, "demo", *save_npy(q, k, v), "--longest", 16, "--feature-map", "exp",
        "--plot", "picture.svg",
    )  # fmt: skip
    assert "(2, 3000, 5)" in text
    assert "(2, 5, 7)" in text
    assert "256 of 3,000 queries" in text
    assert text.count(" ok") == 2
    assert "<svg" in Path("picture.svg").read_text("utf-8")


def test_demo_says_so_if_the_result_is_wrong(hasty: None, capsys: Any, monkeypatch: Any) -> None:
    from linattn.cli import demo

    right = demo.linear_attention
    monkeypatch.setattr(
        demo, "linear_attention", lambda *a, **o: right(*a, **o) * (1 + 1e-4 * ("order" not in o))
    )
    status = main(["demo", "--longest", "16"])
    out, err = capsys.readouterr()
    assert status == 1
    assert out.count("WRONG") == 2
    assert "the check failed" in err and err.count("\n") == 1


def test_demo_of_bad_arguments(capsys: Any) -> None:
    assert "--feature-map: expected one of" in bad(capsys, "demo", "--feature-map", "elu2")
    assert "linattn fidelity takes all" in bad(capsys, "demo", "--feature-map", "taylor")
    assert "expected a name that ends in .png, .svg or .pdf" in bad(
        capsys, "demo", "--plot", "picture.txt"
    )
    assert "'--n'" in bad(capsys, "demo", "--n", "0", status=2)
    assert "No such file" in bad(capsys, "demo", "q.npy", "k.npy", "v.npy")
    files = save_npy(np.ones((2, 3)), np.ones((2, 4)), np.ones((2, 3)))
    assert "expected as many features" in bad(capsys, "demo", *files)
    files = save_npy(*(np.array([[1.0], [np.nan]]), np.ones((2, 1)), np.ones((2, 1))))
    assert "q.npy: expected finite numbers, got 1 that are not" in bad(capsys, "demo", *files)


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_the_same_figures_give_the_same_picture(suffix: str) -> None:
    from linattn.cli._picture import Line, Panel, draw

    for name in ("a", "b"):
        panel = Panel("time", "seconds", [Line("ours", [16, 64], [1e-6, 3e-6], 0, "note")])
        draw(name + suffix, "a title", [panel], "n")
        time.sleep(1.1 * (name == "a"))  # dates are kept in seconds
    assert Path("a" + suffix).read_bytes() == Path("b" + suffix).read_bytes()


def test_notes_in_a_picture_do_not_overlap() -> None:
    from linattn.cli._picture import spread

    assert spread([], 10) == []
    assert spread([0, 20], 10) == [0, 20]
    assert spread([0, 4, 30], 10) == [-3, 7, 30]
    heights = sorted(normal(1, 17) * 40)
    moved = spread(heights, 10)
    assert min(b - a for a, b in itertools.pairwise(moved)) > 10 - 1e-9
    assert sum(moved) == pytest.approx(sum(heights))


def test_pictures_without_matplotlib(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "needs the package matplotlib" in bad(capsys, "demo", "--plot", "picture.png")
    assert "pip install 'linattn[cli]'" in bad(capsys, "bench", "--plot", "picture.png")


def test_safetensors_without_the_package(capsys: Any, monkeypatch: Any) -> None:
    files = save_safetensors(*(np.ones((2, 2)) for _ in range(3)))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert "a .safetensors file needs the package safetensors" in bad(
        capsys, "attend", *files, "-o", "out.npy"
    )


def test_explain(capsys: Any) -> None:
    text = good(capsys, "explain", "--n", 8192)
    assert "134,217,728  17,179,869,184" in text
    assert "takes: linear order, parallel form (128.00x fewer operations)" in text
    assert "chunked form" in good(capsys, "explain", "--n", 128, "--causal")
    sizes = "--n-q 7 --n-k 11 --d 3 --d-v 5 -D 13 --batch 2 --groups 2 --itemsize 2".split()
    found = json.loads(good(capsys, "explain", *sizes, "--order", "linear", "--json"))
    expected = linattn.plan(7, 11, 3, 5, D=13, batch=2, groups=2, itemsize=2, order="linear")
    assert found["linear"]["operations"] == expected.linear.operations
    assert found["order"] == "linear"
    assert "--order: expected one of" in bad(capsys, "explain", "--order", "fast")
    wide = ("explain", "--d", 4, "--feature-map", "taylor", "--features")
    assert "D 15" in good(capsys, *wide, 15)
    assert "--features: expected 15, those of --feature-map taylor" in bad(capsys, *wide, 7)
    assert "n_q: expected at least 0" in bad(capsys, "explain", "--n=-1")
    assert "pass the earlier keys as a state" in bad(capsys, "explain", "--n-q", 1, "--causal")


def test_explain_with_rates(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(_measure, "matmul_rate", lambda: 1e11)
    monkeypatch.setattr(_measure, "copy_rate", lambda: 1e10)
    text = good(capsys, "explain", "--n", 8192, "--measure")
    assert "seconds, at least" in text
    assert "measured: 100 GFLOP/s in a float32 matrix product, 10 GB/s in a copy" in text


def test_info(capsys: Any) -> None:
    text = good(capsys, "info")
    config = linattn.show_config()
    assert linattn.__version__ in text
    assert f"{config.threads}, of" in text
    assert config.instruction_set is None or config.instruction_set in text
    found = json.loads(good(capsys, "info", "--json"))
    assert found["backend"] == config.backend
    assert found["optional"]["matplotlib"]
    for name in linattn.feature_maps.catalogue():
        assert re.search(rf"\b{name}\b", text)


def test_info_names_what_is_missing(capsys: Any, monkeypatch: Any) -> None:
    from linattn.cli import info

    monkeypatch.setitem(info.OPTIONAL, "no-such-package", ("nothing", "'linattn[none]'"))
    text = good(capsys, "info")
    assert re.search(r"no-such-package +missing, for nothing: pip install 'linattn\[none\]'", text)


WITHOUT_CORE = "import sys; sys.modules['linattn._native'] = None\n" + RUN.partition("; ")[2]
ARRAY = {"LINATTN_REQUIRE_NATIVE": "", "LINATTN_BACKEND": ""}


def test_without_the_core(files: list[str]) -> None:
    """It works, and says once and in one line what is missing."""
    run = python(WITHOUT_CORE, "attend", *files, "-o", "out.npy", env=ARRAY)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("\n") == 1
    assert run.stderr.startswith("linattn: note: linattn's compiled core is missing")
    q, k, v = (np.load(name) for name in files)
    close(np.load("out.npy"), *definition(q, k, v, "elu1"))
    run = python(WITHOUT_CORE, "info", env=ARRAY)
    assert run.returncode == 0, run.stderr
    assert "missing: the slower array backend serves" in run.stdout
    assert "To get the fast one: " in run.stdout and "compiler" in run.stdout


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_extra(package: str) -> None:
    code = f"import sys; sys.modules['{package}'] = None\n" + RUN.partition("; ")[2]
    run = python(code, "info")
    assert run.returncode == 1
    assert run.stdout == ""
    assert run.stderr == (
        f"linattn: the command line needs the package {package}, which the extra cli brings: "
        "pip install 'linattn[cli]'\n"
    )


def test_bench(hasty: None, capsys: Any) -> None:
    text = good(
        capsys, "bench", "--n", "16,32", "--d", "8,16", "--heads", "2", "--budget", 0.001,
        "--dtype", "float32,bfloat16", "--form", "parallel,chunked,recurrent", "--threads", "1",
        "--against", "quadratic,textbook,softmax", "--json", "result.json", "--plot", "b.png",
    )  # fmt: skip
    assert "heads 2, threads 1" in text
    assert "quadratic is" in text
    found = json.loads(Path("result.json").read_text())
    rows = found["rows"]
    assert len(rows) == 2 * 2 * (2 + 2 + 1)
    assert {row["form"] for row in rows} == {"parallel", "chunked", "recurrent"}
    first = rows[0]
    assert first["operations"] == 4 * 2 * 16 * 8 * 8
    assert first["rate"] == pytest.approx(first["operations"] / first["seconds"])
    assert set(first["against"]) == {"quadratic", "textbook", "softmax"}
    assert Path("b.png").read_bytes().startswith(b"\x89PNG")
    assert linattn.get_num_threads() == found["about"]["threads"]

    status = main(["bench", "--n", "16", "--budget", "0.001", "--json", "-", "--against", ""])
    out, err = capsys.readouterr()
    assert status == 0
    assert json.loads(out)["rows"][0]["n"] == 16  # nothing else is on stdout
    assert "GFLOP/s" in err


def test_bench_of_a_family(hasty: None, capsys: Any) -> None:
    """As many features as the map makes, and none that need positions."""
    good(
        capsys, "bench", "--n", "16", "--d", "4", "--feature-map", "taylor", "--json", "t.json",
        "--form", "parallel,chunked,recurrent", "--budget", 0.001,
    )  # fmt: skip
    rows = json.loads(Path("t.json").read_text())["rows"]
    assert [row["operations"] for row in rows] == [4 * n * 15 * 4 for n in (16, 16, 1)]
    assert "textbook" in rows[0]["against"]
    text = bad(capsys, "bench", "--feature-map", "cosformer(length=99)")
    assert "--feature-map cosformer(length=99): expected a map that doesn't depend on" in text


def test_lines_of_a_bench_can_be_told_apart(hasty: None, capsys: Any, monkeypatch: Any) -> None:
    from linattn.cli import _picture

    drawn: list[Any] = []
    monkeypatch.setattr(_picture, "draw", lambda *given: drawn.extend(given[2]))
    good(
        capsys, "bench", "--n", "16", "--d", "2,3", "--heads", "1,2", "--dtype", "float32,float64",
        "--budget", 0.001, "--plot", "b.png",
    )  # fmt: skip
    lines = drawn[1].lines
    assert len({line.name for line in lines}) == len({line.style for line in lines}) == 17
    assert {"parallel, 1 head, 2 features, float32", "chunked, 2 heads, 3 features, float64"} <= {
        line.name for line in lines
    }


def test_results_that_cannot_be_written(hasty: None, capsys: Any, monkeypatch: Any) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    for command in (
        ("bench", "--n", "16", "--json", "b.json"),
        ("bench", "--n", "16", "--plot", "b.png"),
        ("demo", "--longest", "16", "--plot", "b.png"),
    ):
        assert main(list(command)) == 1
        err = capsys.readouterr().err
        assert err.endswith("No space left on device; nothing was written\n"), err
        assert err.count("\n") == 1
    assert os.listdir() == []


def test_bench_of_bad_arguments(capsys: Any) -> None:
    assert "--n: expected integers" in bad(capsys, "bench", "--n", "1,x", status=2)
    assert "at least 1, got 0" in bad(capsys, "bench", "--heads", "0", status=2)
    assert "--dtype: expected float16" in bad(capsys, "bench", "--dtype", "int8", status=2)
    assert "--form: expected" in bad(capsys, "bench", "--form", "full", status=2)
    assert "--against: expected" in bad(capsys, "bench", "--against", "torch", status=2)
    assert "a name that ends in .json" in bad(capsys, "bench", "--json", "out.txt")
    plot = ("--form", "recurrent", "--plot", "out.png")
    assert "a picture needs a form over lengths" in bad(capsys, "bench", *plot)


def test_help(capsys: Any) -> None:
    for command in ("demo", "attend", "explain", "bench", "info"):
        assert f"linattn {command}" in good(capsys, command, "--help")


# --------------------------------------------------------------------------------- measuring


def test_fit_and_crossover() -> None:
    n = [16, 64, 256, 1024]
    fit = _measure.fit(n, [3e-6 * x**1.5 for x in n])
    assert fit is not None
    assert fit.exponent == pytest.approx(1.5)
    assert fit(100) == pytest.approx(3e-6 * 1000)
    assert _measure.fit(n, n, least=1000) is None
    linear, square = [64.0 * x for x in n], [1.0 * x * x for x in n]
    assert _measure.crossover(n, linear, square) == pytest.approx(64)
    assert _measure.crossover(n, [1.0] * 4, [2.0] * 4) == 16
    assert _measure.crossover(n, [2.0] * 4, [1.0] * 4) is None
    assert _measure.crossover(n, [50.0 * x for x in n], square) == pytest.approx(50)


def test_the_textbook_functions_are_right() -> None:
    q, k, v = (normal(i, 2, 67, 5) for i in range(3))
    for name in linattn.feature_maps.names():
        if name != "identity":
            eps = linattn.feature_maps.get(name).eps
            out = _measure.textbook(q, k, v, _measure.textbook_map(name), eps)
            close(out, *definition(q, k, v, name), c=16)
    np.testing.assert_allclose(
        _measure.textbook_softmax(q[0], k[0], v[0]),
        linattn.softmax_attention(q[0], k[0], v[0]),
        rtol=1e-12,
    )


def test_where_linear_attention_becomes_the_faster_one() -> None:
    from linattn.cli.demo import Series, _crossing

    n = [16, 64, 256, 1024]
    ours = Series(n[:3], [1.0, 4.0, 16.0])
    assert "about n = 32" in _crossing("x", ours, Series(n, [0.5, 8.0, 128.0, 2048.0]))
    assert "every length measured, from n = 16" in _crossing("x", ours, Series(n, [2, 8, 32, 128]))
    assert "Not faster than x at any length up to n = 64" in _crossing(
        "x", ours, Series(n[:2], [0.1, 0.2])
    )


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_is_what_it_must_be() -> None:
    matrix = 4 * 1024**2
    measured = _measure.extra_memory("textbook softmax", 1024, 8, "elu1")
    assert measured is not None
    assert 2 * matrix < measured < 5 * matrix
    measured = _measure.extra_memory("linear", 1024, 8, "elu1")
    assert measured is not None and measured < matrix
