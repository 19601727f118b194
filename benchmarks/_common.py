"""What the benchmarks share: honest timing, the machine's own rates, the table.

Ratios are taken within one run: the sides take turns, and each round gives one ratio, of which the
median and the quartiles are shown. Before a turn all rest until the process is idle: the workers of
OpenBLAS and torch spin on after a product and would take a core from whoever comes next. Short work
is timed as many calls in a row.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any

# A kernel forced upon OpenBLAS, usually an old machine's, would make the other side look slow.
# OpenBLAS reads these when NumPy is imported.
IGNORED = {
    name: os.environ.pop(name)
    for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")
    if "numpy" not in sys.modules and name in os.environ
}

import numpy as np  # noqa: E402

import linattn  # noqa: E402
from linattn.cli import _measure  # noqa: E402

Array = Any
Side = Callable[[], object]

LONG = 0.3  # seconds of a call whose start doesn't matter
D = 64


# ------------------------------------------------------------------------------------- arguments


@dataclass
class Options:
    """What the command line said."""

    quick: bool = False
    rounds: int = 7
    turn: float = 0.05  # seconds that a turn takes at least
    rest: bool = True  # before a turn
    json: Path | None = None
    plot: Path | None = None


def parser(doc: str | None, *, plot: bool = False) -> argparse.ArgumentParser:
    """The arguments that every benchmark takes."""
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--quick", action="store_true", help="tiny sizes: does it run? no verdicts")
    made.add_argument("--rounds", type=int, help="turns that each side takes (default 7)")
    made.add_argument("--turn", type=float, help="seconds a turn takes at least (default 0.05)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    if plot:
        made.add_argument("--plot", type=Path, metavar="FILE", help="draw a picture (needs [cli])")
    return made


def options(given: argparse.Namespace) -> Options:
    """The parsed arguments with their defaults."""
    o = Options(quick=given.quick, json=given.json, plot=getattr(given, "plot", None))
    if o.quick:
        o.rounds, o.turn, o.rest = 2, 0.0, False
    if given.rounds is not None:
        o.rounds = given.rounds
    if given.turn is not None:
        o.turn = given.turn
    return o


# ---------------------------------------------------------------------------------------- timing


def once(side: Side, calls: int = 1) -> float:
    """Seconds a call, of some calls in a row."""
    start = time.perf_counter()
    for _ in repeat(None, calls):
        side()
    return (time.perf_counter() - start) / calls


def rest(o: Options) -> None:
    """Until the process is idle, as `linattn demo` rests."""
    if o.rest:
        _measure.rest()


def race(sides: Mapping[str, Side], o: Options) -> dict[str, list[float]]:
    """Seconds a call, a number for each side and round; the sides take turns."""
    calls, long = {}, set()
    for name, side in sides.items():
        once(side)  # which may load or compile something
        lasts = once(side)
        if lasts > LONG:
            long.add(name)
        calls[name] = max(1, math.ceil(o.turn / max(lasts, 1e-7)))
    times: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for _ in range(o.rounds):
        for name in names:
            rest(o)
            if name not in long:
                sides[name]()  # wakes the threads that sleep, fills the caches
            times[name].append(once(sides[name], calls[name]))
        names.reverse()  # so that a drift of the machine favours nobody
    return times


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(above, below, strict=True)]


def median(values: Iterable[float]) -> float:
    return statistics.median(values)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def seconds(value: float) -> str:
    """A duration as people write it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


# --------------------------------------------------------------------------------------- machine


class Machine:
    """The rates that everything is compared with, measured in the same run.

    matmul_rate:
        float32 operations a second of NumPy's product of two 2048 x 2048 matrices
    copy_rate:
        bytes a second, read plus written, of a copy on all threads; copy_rate_1: on one
    """

    def __init__(self, o: Options) -> None:
        self.size = 128 if o.quick else 2048
        self.threads = linattn.get_num_threads()
        rng = np.random.default_rng(1)
        self._a, self._b = (
            rng.standard_normal((self.size, self.size), dtype=np.float32) for _ in range(2)
        )
        self._product = np.empty_like(self._a)
        self.matmul_operations = 2 * self.size**3
        part = (1 if o.quick else 64) << 20
        parts = [(np.ones(part, np.uint8), np.ones(part, np.uint8)) for _ in range(self.threads)]
        with ThreadPoolExecutor(self.threads) as pool:
            times = race(
                {
                    "matmul": self.matmul,
                    "copy": lambda: list(pool.map(lambda p: np.copyto(*p), parts)),
                    "copy_1": lambda: np.copyto(*parts[0]),
                },
                o,
            )
        self.matmul_rate = self.matmul_operations / median(times["matmul"])
        self.copy_rate = 2 * part * self.threads / median(times["copy"])
        self.copy_rate_1 = 2 * part / median(times["copy_1"])

    def matmul(self) -> None:
        """A side of a race: the matrix product."""
        np.matmul(self._a, self._b, out=self._product)

    def share(
        self, operations: float, ours: Sequence[float], theirs: Sequence[float]
    ) -> list[float]:
        """Our rate over that of the matrix product, round by round."""
        scale = operations / self.matmul_operations
        return [scale * t / o for o, t in zip(ours, theirs, strict=True)]

    def about(self) -> dict[str, Any]:
        config = linattn.show_config()
        return {
            "cpu": _cpu(),
            "threads": self.threads,
            "instruction_set": config.instruction_set,
            "backend": config.backend,
            "linattn": config.version,
            "numpy": np.__version__,
            "blas": _blas(),
            "python": platform.python_version(),
            "matmul_rate": self.matmul_rate,
            "copy_rate": self.copy_rate,
            "copy_rate_1": self.copy_rate_1,
        }


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    for line in text.splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _blas() -> str:
    try:
        found = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    except Exception:  # an older NumPy only prints it
        return "unknown"
    return f"{found.get('name')} {found.get('version')}"


class Others:
    """What share of the machine other processes took since this was made; Linux tells."""

    def __init__(self) -> None:
        self._start = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        """Seconds on all cores: of all processes, and of this one with its children."""
        try:
            line = Path("/proc/stat").read_text("ascii").partition("\n")[0]
        except OSError:
            return math.nan, math.nan
        user, nice, system, _, _, irq, soft, steal = (int(x) for x in line.split()[1:9])
        busy = (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")
        own = os.times()
        return busy, own.user + own.system + own.children_user + own.children_system

    def share(self, wall: float) -> float:
        """Of all cores over that many seconds; nan where nobody tells."""
        (busy_0, own_0), (busy, own) = self._start, self._now()
        return max(0.0, (busy - busy_0) - (own - own_0)) / (wall * (os.cpu_count() or 1))


# ---------------------------------------------------------------------------------------- report


@dataclass(frozen=True)
class Target:
    """What a number should be: at least, at most, or about a bound."""

    sign: str  # ">=", "<=" or "="
    bound: float
    width: float = 0.0  # of "="

    def reached(self, value: float) -> bool:
        if self.sign == ">=":
            return value >= self.bound
        if self.sign == "<=":
            return value <= self.bound
        return abs(value - self.bound) <= self.width

    def by(self, value: float) -> str:
        """How far a value that misses it is off."""
        if self.sign == "=":
            return f"off by {abs(value - self.bound):.3f}"
        return f"by {abs(value / self.bound - 1):.0%}" if self.bound else ""

    def __str__(self) -> str:
        if self.sign == "=":
            return f"{self.bound:.2f} ± {self.width:.2f}"
        return f"{'≥' if self.sign == '>=' else '≤'} {self.bound:.4g}"


def at_least(bound: float) -> Target:
    return Target(">=", bound)


def at_most(bound: float) -> Target:
    return Target("<=", bound)


def about(bound: float, width: float) -> Target:
    return Target("=", bound, width)


_FORMS = {"x": "{:.2f}x", "": "{:.3f}", "us": "{:.2f} us", "MiB": "{:.2f} MiB", "e": "{:.2g}"}


@dataclass
class Row:
    """One line of the table."""

    what: str
    value: float
    low: float
    high: float
    unit: str
    shown: str
    target: str = ""
    reached: bool | None = None
    verdict: str = ""
    note: str = ""
    data: dict[str, Any] = field(default_factory=dict)


class Report:
    """Prints row after row as they come, and in the end a verdict and the JSON."""

    def __init__(self, name: str, doc: str | None, o: Options) -> None:
        self.name, self.options = name, o
        self.question = (doc or "").partition("\n")[0]
        self.rows: list[Row] = []
        self.notes: list[str] = []
        print(f"{name}: {self.question}")
        self.others: float | None = None
        self._started, self._counted = time.perf_counter(), Others()
        self.machine = Machine(o)
        m = self.machine.about()
        print(
            f"linattn {m['linattn']} ({m['instruction_set'] or m['backend']}, {m['threads']} "
            f"threads), NumPy {m['numpy']} ({m['blas']}), {m['cpu']}\n"
            f"float32 matrix product {self.machine.size}^3: {m['matmul_rate'] / 1e9:.1f} GFLOP/s; "
            f"copy: {m['copy_rate'] / 1e9:.1f} GB/s on all threads, "
            f"{m['copy_rate_1'] / 1e9:.1f} GB/s on one (read + written)"
        )
        if IGNORED:
            self.note(f"{', '.join(IGNORED)} of the environment is not passed on to NumPy")

    def heading(self, text: str) -> None:
        print(f"\n{text}", flush=True)

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(f"note: {text}", flush=True)

    def row(
        self,
        what: str,
        values: Sequence[float] | float,
        unit: str = "",
        target: Target | None = None,
        note: str = "",
        **data: Any,
    ) -> Row:
        """A number, or the median of some with its quartiles, against a target."""
        values = [values] if isinstance(values, (int, float)) else list(values)
        value = median(values)
        low, high = quartiles(values)
        form = _FORMS[unit]
        shown = form.format(value)
        if len(values) > 1:
            shown += f" [{form.format(low)}, {form.format(high)}]".replace(f" {unit},", ",")
        row = Row(what, value, low, high, unit, shown, note=note, data=data)
        if target is not None:
            row.target = str(target)
            if self.options.quick:
                row.verdict = "quick: no verdict"
            else:
                row.reached = target.reached(value)
                row.verdict = "reached" if row.reached else f"missed {target.by(value)}".rstrip()
        self.rows.append(row)
        print(f"  {what:<50} {shown:<29} {row.target:<12} {row.verdict:<17} {note}".rstrip())
        sys.stdout.flush()
        return row

    def finish(self) -> None:
        share = self._counted.share(time.perf_counter() - self._started)
        if math.isfinite(share):
            self.others = share
            if share > 0.05 and not self.options.quick:
                self.note(
                    f"other processes took {share:.0%} of the machine during this run, of which "
                    "OpenBLAS and torch suffer most: all these numbers are rough"
                )
        judged = [row for row in self.rows if row.reached is not None]
        reached = sum(bool(row.reached) for row in judged)
        print(f"\n{self.name}: {reached} of {len(judged)} targets reached")
        for row in judged:
            if not row.reached:
                print(f"  {row.verdict}: {row.what}: {row.shown}, target {row.target}")
        if self.options.json is not None:
            self.options.json.write_text(
                _json(
                    {
                        "benchmark": self.name,
                        "question": self.question,
                        "quick": self.options.quick,
                        "machine": self.machine.about(),
                        "others": self.others,
                        "notes": self.notes,
                        "rows": [asdict(row) for row in self.rows],
                    }
                ),
                "utf-8",
            )


def _json(value: Any) -> str:
    """JSON, where a number that isn't finite (an overflow) is null."""

    def plain(x: Any) -> Any:
        if isinstance(x, dict):
            return {key: plain(part) for key, part in x.items()}
        if isinstance(x, list):
            return [plain(part) for part in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return json.dumps(plain(value), indent=1, allow_nan=False)


def run(
    name: str,
    doc: str | None,
    *measures: Callable[[Report, Options], object],
    plot: bool = False,
    child: Callable[[Options, Any], Any] | None = None,
) -> None:
    """What a benchmark does when it is called: reads the arguments, measures, ends its report.

    child:
        what it does in a process of its own, where `apart` sent it
    """
    arguments = parser(doc, plot=plot)
    if child is not None:
        arguments.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if child is not None and given.case is not None:
        print(json.dumps(child(options(given), given.case)))
        return
    o = options(given)
    report = Report(name, doc, o)
    for measure in measures:
        measure(report, o)
    report.finish()


def apart(script: str, case: Any, o: Options, environment: Mapping[str, str] | None = None) -> Any:
    """What a benchmark's `child` answers to a case, in a process of its own; both are JSON."""
    command = [sys.executable, script, "--case", json.dumps(case)]
    command += ["--rounds", str(o.rounds), "--turn", str(o.turn), *["--quick"] * o.quick]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


# ---------------------------------------------------------------------------------------- memory

MEBI = 1 << 20

NO_PEAK = "skipped: Windows tells no peak by the standard library"

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak() -> int:
    """The most memory that this process held since `forget_peak`, in bytes."""
    if _STATUS.exists():
        for line in _STATUS.read_text("utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
        raise OSError(f"{_STATUS} has no VmHWM")
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


def forget_peak() -> int:
    """From now on the peak is what is held now, which is returned."""
    try:
        _CLEAR.write_text("5", "utf-8")
    except OSError:  # not Linux, or not allowed: the peak so far stands in for it
        pass
    return peak()


# ---------------------------------------------------------------------- inputs, and the other side


def qkv(*shape: int, dtype: Any = np.float32, seed: int = 0) -> tuple[Array, Array, Array]:
    """Normal random queries, keys and values of a shape (..., n, d)."""
    rng = np.random.default_rng(seed)
    made = (rng.standard_normal(shape, dtype=np.float32) for _ in range(3))
    q, k, v = (x.astype(dtype, copy=False) for x in made)
    return q, k, v


def elu1(x: Array) -> Array:
    """The textbook's map, elu(x) + 1."""
    return np.where(x > 0, x + 1, np.exp(x))


def textbook(
    Q: Array, K: Array, V: Array, feature_map: Callable[[Array], Array] = elu1, eps: float = 1e-6
) -> Array:
    """Linear attention as it is usually written in NumPy: (..., n, d) -> (..., n, d_v)."""
    phi_q, phi_k = feature_map(Q), feature_map(K)
    kv = phi_k.swapaxes(-1, -2) @ V
    z = phi_k.sum(axis=-2)
    return (phi_q @ kv) / ((phi_q @ z[..., None]) + eps)


def textbook_causal(Q: Array, K: Array, V: Array, chunk: int = 128, eps: float = 1e-6) -> Array:
    """The causal form in NumPy as well as it goes: chunks, all at once; n a multiple of them.

    Within a chunk a masked product, before it an exclusive sum over the chunks.
    """
    *batch, n, d = Q.shape
    d_v = V.shape[-1]
    chunk = math.gcd(n, chunk)
    q, k = (elu1(x).reshape(*batch, n // chunk, chunk, d) for x in (Q, K))
    v = V.reshape(*batch, n // chunk, chunk, d_v)
    kv, z = k.swapaxes(-1, -2) @ v, k.sum(axis=-2)
    kv, z = np.cumsum(kv, axis=-3) - kv, np.cumsum(z, axis=-2) - z
    scores = np.tril(q @ k.swapaxes(-1, -2))
    numerator = q @ kv + scores @ v
    denominator = q @ z[..., None] + scores.sum(axis=-1, keepdims=True) + eps
    return (numerator / denominator).reshape(*batch, n, d_v)


def softmax(Q: Array, K: Array, V: Array) -> Array:
    """Softmax attention as it is usually written in NumPy, n x n scores and all."""
    scores = Q @ K.swapaxes(-1, -2) / np.sqrt(np.float32(Q.shape[-1]))
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (scores @ V) / scores.sum(axis=-1, keepdims=True)


def operations(n: int, heads: int = 1, d: int = D) -> int:
    """As all rates here count them, causal or not: 4 n D d_v a head."""
    return 4 * n * d * d * heads
