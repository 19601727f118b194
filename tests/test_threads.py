"""Threads: after fork(), called from many of them at once, how many there are, and when idle."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import cases
import numpy as np
import pytest
from cases import MAPS, inputs, same_bits

from linattn import State, backends, config, get_num_threads, linear_attention, set_num_threads
from linattn.backends import native

Array = Any

N, D_K, D_V = 4099, 33, 17  # large enough to be shared by threads
LIMIT = 60.0  # seconds until a process or thread that waits counts as stuck

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork() on this system")
needs_core = pytest.mark.skipif(native.extension is None, reason="the core was not built")


@contextlib.contextmanager
def threads_of(n: int) -> Iterator[None]:
    """A number of threads, for the block."""
    set_num_threads(n)
    try:
        yield
    finally:
        if backends.native.extension is not None:
            backends.native.extension.set_num_threads(0)  # as if never set
        config._threads = None


CALLS: tuple[dict[str, Any], ...] = (
    {"feature_map": "elu1"},
    {"feature_map": "elu1", "causal": True},
    {"feature_map": "exp", "causal": True},
    {"feature_map": "mirror", "causal": True},
    {"feature_map": "exp", "order": "quadratic"},
    {"feature_map": "relu", "key_mask": np.arange(N) % 3 != 1},
    {"feature_map": "softplus", "causal": True, "cu_seqlens": [0, 5, 5, 2000, N]},
)


def compute(q: Array, k: Array, v: Array, call: dict[str, Any]) -> Array:
    options = dict(call)
    feature_map = MAPS[options.pop("feature_map")]
    if options.get("order") == "quadratic":
        q = q[..., :301, :]
    return linear_attention(q, k, v, feature_map, **options)


def problem(seed: int) -> Any:
    return inputs(seed, (2,), N, D_K, D_V, np.float32)


# ------------------------------------------------------------------------------------------ fork


def in_child(work: Any) -> str:
    """What work() returns, or the error it raises, in a child that fork() makes."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            try:
                said, code = str(work()), 0
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            os.write(writing, said.encode()[:4000])
        finally:
            os._exit(code)
    os.close(writing)
    end, status = time.monotonic() + LIMIT, None
    while status is None and time.monotonic() < end:
        gone, found = os.waitpid(child, os.WNOHANG)
        status = found if gone else None
        if status is None:
            time.sleep(0.005)
    if status is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    assert status is not None, f"the child hung ({said})"
    assert status == 0, f"the child ended with status {status}: {said}"
    return said


# Python 3.12 warns of every fork() of a process with threads, which is what is tested.
forks = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@needs_fork
@forks
@pytest.mark.parametrize("used", [False, True], ids=["at once", "after threads in parent"])
def test_fork(backend: str, used: bool) -> None:
    """A child has none of its parent's workers; it starts its own, and gets the same bits."""
    q, k, v = problem(1)
    with threads_of(4):
        expected = [compute(q, k, v, call) for call in CALLS] if used else None

        def work() -> str:
            first = [compute(q, k, v, call) for call in CALLS]
            for before, call in zip(expected or first, CALLS, strict=True):
                same_bits(compute(q, k, v, call), before, call)
            with threads_of(3):
                return str(get_num_threads())

        for _ in range(3):
            assert in_child(work) == "3"
        assert get_num_threads() == 4
        for before, call in zip(expected or (), CALLS, strict=False):  # the parent goes on
            same_bits(compute(q, k, v, call), before, call)


@needs_fork
@forks
def test_fork_in_fork(backend: str) -> None:
    q, k, v = problem(2)
    call = {"feature_map": "elu1", "causal": True}
    with threads_of(4):
        expected = compute(q, k, v, call)

        def inner() -> str:
            same_bits(compute(q, k, v, call), expected)
            return "inner"

        def outer() -> str:
            same_bits(compute(q, k, v, call), expected)
            said = in_child(inner)
            same_bits(compute(q, k, v, call), expected)
            return said

        assert in_child(outer) == "inner"


@needs_fork
@forks
def test_fork_while_others_compute(backend: str) -> None:
    """At whatever moment of a call on another thread."""
    if backend == "array":
        pytest.skip("NumPy's own locks are not ours to test")
    q, k, v = problem(3)
    call = {"feature_map": "elu1", "causal": True}
    with threads_of(4):
        expected = compute(q, k, v, call)
        stop, wrong = threading.Event(), []

        def keep_on() -> None:
            try:
                while not stop.is_set():
                    same_bits(compute(q, k, v, call), expected)
            except BaseException as error:
                wrong.append(error)

        def work() -> str:
            same_bits(compute(q, k, v, call), expected)
            return "right"

        others = [threading.Thread(target=keep_on) for _ in range(2)]
        for other in others:
            other.start()
        try:
            for _ in range(20):
                assert in_child(work) == "right"
        finally:
            stop.set()
            for other in others:
                other.join(LIMIT)
        assert not any(other.is_alive() for other in others)
        assert not wrong, wrong


def _attend(seed: int) -> Array:
    q, k, v = problem(seed)
    return compute(q, k, v, CALLS[seed % len(CALLS)])


@forks
@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="no fork() on this system"
)
def test_multiprocessing_fork(backend: str) -> None:
    seeds = range(len(CALLS))
    with threads_of(3):
        expected = [_attend(seed) for seed in seeds]
        with multiprocessing.get_context("fork").Pool(2) as pool:
            found = pool.map_async(_attend, seeds, chunksize=1).get(LIMIT)
        for a, b, seed in zip(found, expected, seeds, strict=True):
            same_bits(a, b, CALLS[seed])


# --------------------------------------------------------------------------- many Python threads


@pytest.mark.parametrize("threads", [1, 4])
def test_eight_callers_at_once(backend: str, threads: int) -> None:
    """Calls of all forms at once, each of which gets the bits that it gets alone."""
    callers = 8
    problems = [problem(10 + i) for i in range(callers)]
    if backend == "array":
        problems = [tuple(x[:, :523] for x in arrays) for arrays in problems]
    length = problems[0][0].shape[-2]
    calls = [
        {**call, **({"key_mask": call["key_mask"][:length]} if "key_mask" in call else {})}
        for call in CALLS
        if "cu_seqlens" not in call or length == N
    ]
    with threads_of(threads):
        alone = [[compute(*arrays, call) for call in calls] for arrays in problems]
        states = [State.of(*arrays[1:], "exp").query(arrays[0]) for arrays in problems]
        start, errors = threading.Barrier(callers), []

        def caller(i: int) -> None:
            try:
                arrays = problems[i]
                start.wait(LIMIT)
                for turn in range(2):
                    for at in range(len(calls)):
                        at = (at + i + turn) % len(calls)
                        same_bits(compute(*arrays, calls[at]), alone[i][at], (i, calls[at]))
                    found = State.of(*arrays[1:], "exp").query(arrays[0])
                    same_bits(found, states[i], (i, "state"))
            except BaseException as error:
                errors.append(error)

        workers = [threading.Thread(target=caller, args=(i,), daemon=True) for i in range(callers)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(LIMIT)
        assert not any(worker.is_alive() for worker in workers), "a caller hangs"
        assert not errors, errors[0]


def test_number_changes_while_others_compute(backend: str) -> None:
    """Calls under way keep the number that they began with, whose bits don't depend on it."""
    q, k, v = problem(4)
    expected = linear_attention(q, k, v)
    stop, errors = threading.Event(), []

    def keep_on() -> None:
        try:
            while not stop.is_set():
                same_bits(linear_attention(q, k, v), expected)
        except BaseException as error:
            errors.append(error)

    others = [threading.Thread(target=keep_on, daemon=True) for _ in range(3)]
    with threads_of(1):
        for other in others:
            other.start()
        for n in (2, 1, 5, 1, 3, 8) * 5:
            set_num_threads(n)
            time.sleep(0.003)
        stop.set()
        for other in others:
            other.join(LIMIT)
    assert not any(other.is_alive() for other in others)
    assert not errors, errors[0]


# ---------------------------------------------------------------------------- how many there are


def test_one_thread_and_back(backend: str) -> None:
    """The definition's value with every number; and where set back, the same bits as before."""
    q, k, v = (x[:, :1031] for x in problem(5))
    for call in ({"causal": False}, {"causal": True}, {"order": "quadratic"}):
        expected, bound = cases.definition(q, k, v, None, causal=call.get("causal", False))
        first: dict[int, Array] = {}
        for n in (4, 1, 4, 2, 1, 7, 2, 7):
            with threads_of(n):
                assert get_num_threads() == n
                out = linear_attention(q, k, v, **call)  # type: ignore[call-overload]
            cases.close(out, expected, bound, what=(n, call))
            same_bits(out, first.setdefault(n, out), (n, call))


@pytest.mark.parametrize("threads", [1, 2, 4, 7])
def test_same_bits_on_repeat(backend: str, threads: int) -> None:
    q, k, v = problem(6)
    earlier = inputs(7, (2,), 100, D_K, D_V, np.float32)
    before = State.of(*earlier[1:], "exp")
    with threads_of(threads):
        for call in CALLS:
            first = compute(q, k, v, call)
            for _ in range(2 if backend == "array" else 5):
                same_bits(compute(q, k, v, call), first, call)
        for causal in (False, True):
            options: dict[str, Any] = {"causal": causal, "state": before, "return_state": True}
            first, after = linear_attention(q, k, v, "exp", **options)
            for _ in range(3):
                out, state = linear_attention(q, k, v, "exp", **options)
                same_bits(out, first, causal)
                cases.same_states(state, after, causal)


def counted(code: str = "", **environment: str | None) -> int:
    """get_num_threads() of a fresh process, after some code."""
    # The gate demands the core; where a test hides it, that must not be an error.
    unset = ("OMP_NUM_THREADS", "LINATTN_REQUIRE_NATIVE")
    env = {k: v for k, v in os.environ.items() if k not in unset}
    env |= {name: value for name, value in environment.items() if value is not None}
    script = f"import os\n{code}\nimport linattn\nprint(linattn.get_num_threads())"
    found = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=LIMIT
    )
    assert found.returncode == 0, found.stderr
    return int(found.stdout)


either = pytest.mark.parametrize(
    "serving", [pytest.param("native", marks=needs_core), "array"], ids=["native", "array"]
)
affinity = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no CPU affinity here")


def without_core(serving: str) -> str:
    """Code that hides the core, or nothing."""
    return "" if serving == "native" else "import sys; sys.modules['linattn._native'] = None"


@either
@affinity
def test_affinity_decides(serving: str) -> None:
    code = without_core(serving)
    cpus = sorted(os.sched_getaffinity(0))
    assert counted(code) == len(cpus)
    assert counted(f"os.sched_setaffinity(0, {{{cpus[-1]}}})\n{code}") == 1


@either
def test_omp_num_threads_beats_affinity(serving: str) -> None:
    code = without_core(serving)
    assert counted(code, OMP_NUM_THREADS="3") == 3
    assert counted(code, OMP_NUM_THREADS="5,2") == 5  # one number for each level of nesting
    if hasattr(os, "sched_setaffinity"):
        cpu = min(os.sched_getaffinity(0))
        one = f"os.sched_setaffinity(0, {{{cpu}}})\n{code}"
        assert counted(one, OMP_NUM_THREADS="3") == 3


@either
@pytest.mark.parametrize("text", ["", "0", "-2", "many"])
def test_omp_num_threads_without_sense(serving: str, text: str) -> None:
    """As if it were not set."""
    code = without_core(serving)
    assert counted(code, OMP_NUM_THREADS=text) == counted(code)


@either
def test_set_num_threads_beats_omp_num_threads(serving: str) -> None:
    code = f"{without_core(serving)}\nimport linattn\nlinattn.set_num_threads(7)"
    assert counted(code) == 7
    assert counted(code, OMP_NUM_THREADS="3") == 7


@needs_core
def test_no_more_threads_than_set() -> None:
    """What a call starts, as the system counts it."""
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("no /proc")
    code = (
        "import linattn, numpy as np\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        f"q = np.ones((4, {N}, {D_K}), np.float32)\n"
        "linattn.set_num_threads({n})\n"
        "for _ in range(3): linattn.linear_attention(q, q, q, causal=True)\n"
        "linattn.set_num_threads(len(os.listdir('/proc/self/task')) - before + 1)"
    )
    assert counted(code.replace("{n}", "1")) == 1
    assert 2 <= counted(code.replace("{n}", "3")) <= 3


# ------------------------------------------------------------------------------------------ idle


@pytest.mark.parametrize("threads", [2, 8])
def test_idle_workers_sleep(backend: str, threads: int) -> None:
    q, k, v = problem(9)
    with threads_of(threads):
        for _ in range(3):
            linear_attention(q, k, v)
            linear_attention(q, k, v, causal=True)
        began = time.process_time()
        time.sleep(0.3)
        assert time.process_time() - began < 0.1
