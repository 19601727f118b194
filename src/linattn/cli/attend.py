"""`linattn attend`: attention over files, block by block, whatever their size."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import typer

from linattn import State, linear_attention, set_num_threads

from . import _files, _measure
from ._failure import INTERRUPTED, Failure, fail
from ._files import Input, Output, size_of

__all__ = ["attend"]

Array = Any
Index = tuple[slice, ...]

BLOCK = 32 << 20  # bytes of q, k, v and out in a block
STATES = 64 << 20  # bytes of states held at a time, unless all of them are asked for
CHUNK = 64  # positions: a causal block of a multiple of it is cut as the whole would be


def attend(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="Q K V",
            help="Three files (.npy, .safetensors, or FILE:NAME for an array in a larger one), or "
            "one .npz or .safetensors that holds q, k and v.",
        ),
    ],
    output: Annotated[
        str, typer.Option("--output", "-o", help="Where to: .npy, .npz or .safetensors.")
    ],
    causal: Annotated[
        bool, typer.Option("--causal", help="Each position sees itself and those before it.")
    ] = False,
    feature_map: Annotated[
        str | None,
        typer.Option(help="φ, by name; the state's own where one comes in, else elu1."),
    ] = None,
    eps: Annotated[
        float | None, typer.Option(help="Added to each denominator; the map's own by default.")
    ] = None,
    key_mask: Annotated[
        str | None, typer.Option(help="File of booleans, true where a key takes part.")
    ] = None,
    gqa: Annotated[
        bool, typer.Option("--gqa", help="k and v have fewer heads, each for a group of q's.")
    ] = False,
    state_in: Annotated[
        str | None, typer.Option(help="State of the keys that came before (.npz).")
    ] = None,
    state_out: Annotated[
        str | None, typer.Option(help="Where to put the state of all keys seen (.npz).")
    ] = None,
    block: Annotated[
        int | None, typer.Option(min=1, help="Positions in a block; some 32 MiB by default.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads to use.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no summary.")] = False,
) -> None:
    """Linear attention over files: OUT = φ(Q)(φ(K)ᵀV) / (φ(Q) φ(K)ᵀ1).

    Inputs are mapped into memory and walked block by block, so they may be larger than memory.
    Positions are the last axis but one, features the last; what stands before is batch and heads,
    and broadcasts. The output gets its name when it is complete, not before.
    """
    output = _files.checked_output(output, "-o")
    read = {"--key-mask": key_mask, "--state-in": state_in}
    read |= dict(zip(("Q", "K", "V") if len(files) > 1 else ("the input",), files, strict=False))
    sources = {name: _file_of(path) for name, path in read.items()}
    if state_out is not None:
        state_out = _files.checked_output(state_out, "--state-out", (".npz",))
        _files.clashes(state_out, "--state-out", sources)
        _files.clashes(state_out, "--state-out", {"-o": output})
    _files.clashes(output, "-o", sources)
    if feature_map is not None:
        _measure.named_map(feature_map)
    if threads is not None:
        set_num_threads(threads)

    started = time.perf_counter()
    done = f"{output} was not written"
    try:
        with _terminable(), tempfile.TemporaryDirectory(prefix="linattn-") as scratch:
            q, k, v = _files.inputs(files, ("q", "k", "v"), scratch)
            mask = None if key_mask is None else _files.read(key_mask, "key_mask", scratch)
            before = None if state_in is None else _state(state_in, feature_map)
            job = _Job(q, k, v, mask, before, feature_map, eps, causal, gqa, block)
            after = job.all_states() if state_out is not None else None
            with Output(output, job.shape, job.dtype) as target:
                with _progress(job.work, quiet) as advance:
                    for slab in job.slabs():
                        state = job.run(slab, target, advance)
                        if after is not None:
                            job.put(after, slab, state)
                target.finish()
                if after is not None and state_out is not None:
                    _save(job.ungrouped(after), state_out)
                target.commit()
    except KeyboardInterrupt as error:
        status = 143 if error.args else INTERRUPTED
        raise Failure(f"interrupted; {done}", status) from None
    if not quiet:
        seconds = time.perf_counter() - started
        print(
            f"{output}: {job.shape} {job.dtype.name}, {size_of(target.nbytes)}, in {seconds:.3g} s"
        )
        if state_out is not None:
            print(f"{state_out}: the state of {job.n_k:,} keys more")


def _file_of(path: str | None) -> str | None:
    """The file of FILE:NAME."""
    if path is None or os.path.exists(path) or ":" not in path:
        return path
    return path.rsplit(":", 1)[0]


def _state(path: str, feature_map: str | None) -> State:
    try:
        return State.load(path, feature_map)
    except ValueError as error:
        fail(f"--state-in {path}: {str(error).removeprefix('path: ')}")


def _save(state: State, path: str) -> None:
    try:
        state.save(os.path.realpath(path))  # a link stays one
    except OSError as error:
        fail(f"--state-out {path}: {error.strerror or error}; nothing was written")


class _Job:
    """The arguments, found to fit, and the walk over them.

    Batch elements are cut into slabs of which the states fit into memory, and positions into
    blocks. Of a slab, first the keys are absorbed, then the queries answered; where causal, each
    block carries the state on to the next.
    """

    def __init__(
        self,
        q: Input,
        k: Input,
        v: Input,
        mask: Input | None,
        state: State | None,
        feature_map: str | None,
        eps: float | None,
        causal: bool,
        gqa: bool,
        block: int | None,
    ) -> None:
        self.inputs = [x for x in (q, k, v, mask) if x is not None]
        self.q, self.k, self.v = q.array, k.array, v.array
        self.mask = None if mask is None else mask.array
        self.before = state
        self.feature_map = state.feature_map if state is not None else feature_map
        self.eps = eps
        self.causal = causal
        out = self._checked(q, k, v, mask, gqa)
        self.n_q, self.n_k, self.d_v = self.q.shape[-2], self.k.shape[-2], self.v.shape[-1]
        self.shape = (*out.shape[:-2], self.n_q, self.d_v)
        self.dtype = out.dtype
        self.gqa = gqa
        if gqa:
            self._group()
        self.lead = self._lead()
        held = [self.k.shape[:-2], self.v.shape[:-2]]
        self.batch = np.broadcast_shapes(*held, () if state is None else self._past.batch_shape)

        d_k, D = self.q.shape[-1], self.k.shape[-1]
        row = (
            sum((self.q.itemsize * d_k, self.k.itemsize * d_k, self.v.itemsize * self.d_v))
            + self.dtype.itemsize * self.d_v
        )
        rows = max(self.n_q, self.n_k, 1)
        each = 8 * D * (self.d_v + 1)
        fits = min(STATES // each, BLOCK // (row * min(rows, block or 1024)))
        self.elements = max(1, min(fits, math.prod(self.lead)))
        if block is None:
            block = max(1, BLOCK // (row * self.elements))
            block = block if block < CHUNK else block // CHUNK * CHUNK
        self.block = block
        self._last: tuple[Any, State] | None = None

        # Progress is counted in positions times elements, once for keys and once for queries.
        walks = math.prod(self.lead)
        self.work = walks * (self.n_q if causal else self.n_q + self.n_k)

    # Checks

    def _checked(self, q: Input, k: Input, v: Input, mask: Input | None, gqa: bool) -> Array:
        """Everything but the number of positions, by a call that has none: its empty output."""
        named: dict[str, Input] = {"q": q, "k": k, "v": v}
        if mask is not None:
            named["key_mask"] = mask
        for name, x in named.items():
            axes = 1 if name == "key_mask" else 2
            if x.array.ndim < axes:
                fail(
                    f"{name} ({x}): expected at least {axes} axes "
                    f"({'..., positions' if axes == 1 else '..., positions, features'}), got shape "
                    f"{x.array.shape}"
                )
        n_q, n_k, n_v = (x.array.shape[-2] for x in (q, k, v))
        none = {
            name: x.array[..., :0] if name == "key_mask" else x.array[..., :0, :]
            for name, x in named.items()
        }
        try:
            out = linear_attention(
                none["q"], none["k"], none["v"], self.feature_map, self.eps, causal=self.causal,
                key_mask=none.get("key_mask"), enable_gqa=gqa, state=self.before,
            )  # fmt: skip
        except (ValueError, TypeError) as error:
            raise Failure(self._named(str(error), named, none)) from error
        if n_k != n_v:
            fail(
                f"v ({v}): expected one row for each key, got k {k.array.shape} and v "
                f"{v.array.shape}: {n_k:,} and {n_v:,} positions"
            )
        if self.causal and n_q != n_k:
            fail(
                f"--causal: expected q and k of equal length, got {n_q:,} positions in {q} and "
                f"{n_k:,} in {k}; pass the earlier keys as a state, with --state-in"
            )
        if mask is not None and mask.array.shape[-1] != n_k:
            fail(
                f"key_mask ({mask}): expected one entry for each of {n_k:,} keys on its last axis, "
                f"got shape {mask.array.shape}"
            )
        return out

    def _named(self, text: str, named: dict[str, Input], none: dict[str, Array]) -> str:
        """A message of the library, with the files named and the shapes they have."""
        for name, x in named.items():
            text = text.replace(str(none[name].shape), str(x.array.shape))
        text = text.replace("enable_gqa=True", "--gqa")
        name, colon, rest = text.partition(":")
        if name in named:
            return f"{name} ({named[name]}){colon}{rest}"
        if name == "state":
            return f"--state-in{colon}{rest}"
        return text

    # Grouped heads: q (..., H, G, n, d) against k (..., H, 1, n, d), so that all axes broadcast

    def _group(self) -> None:
        heads = max(self.k.shape[-3], self.v.shape[-3])
        *lead, all_heads, n_q, d_k = self.q.shape
        self.q = self.q.reshape(*lead, heads, all_heads // heads, n_q, d_k)
        self.k, self.v = self.k[..., None, :, :], self.v[..., None, :, :]
        if self.mask is not None and self.mask.ndim > 1:
            self.mask = self.mask[..., None, :]

    @property
    def _past(self) -> State:
        """The state given, with an axis of 1 for the groups."""
        assert self.before is not None
        if not self.gqa:
            return self.before
        arrays = self.before.arrays()
        kv = arrays.pop("kv")[..., None, :, :]
        rest = {name: x[..., None, :] for name, x in arrays.items()}
        return State.from_arrays(
            kv, **rest, feature_map=self.before.feature_map, dtype=self.before.dtype
        )

    def ungrouped(self, state: State) -> State:
        """A state as the caller knows it."""
        if not self.gqa:
            return state
        arrays = state.arrays()
        kv = arrays.pop("kv")[..., 0, :, :]
        rest = {name: x[..., 0, :] for name, x in arrays.items()}
        return State.from_arrays(kv, **rest, feature_map=state.feature_map, dtype=state.dtype)

    def _lead(self) -> tuple[int, ...]:
        """The output's leading axes, that of the groups among them."""
        if not self.gqa:
            return self.shape[:-2]
        return (*self.shape[:-3], *self.q.shape[-4:-2])

    # The walk

    def slabs(self) -> Iterator[Index]:
        """Cuts of the leading axes into parts of at most `elements`, in the order of the file."""
        if math.prod(self.lead) == 0:
            return
        axis = len(self.lead)
        below = 1  # elements behind the axis that is cut
        while axis > 0 and below * self.lead[axis - 1] <= self.elements:
            axis -= 1
            below *= self.lead[axis]
        if axis == 0:
            yield tuple(slice(0, n) for n in self.lead)
            return
        axis -= 1
        step = max(1, self.elements // below)
        rest = tuple(slice(0, n) for n in self.lead[axis + 1 :])
        for outer in np.ndindex(*self.lead[:axis]):
            for start in range(0, self.lead[axis], step):
                here = slice(start, min(start + step, self.lead[axis]))
                yield (*(slice(i, i + 1) for i in outer), here, *rest)

    def run(self, slab: Index, target: Output, advance: Any) -> State:
        """The output of a slab; returns the state after all its keys."""
        count = math.prod(s.stop - s.start for s in slab)
        q, k, v = (_part(x, slab, 2) for x in (self.q, self.k, self.v))
        mask = None if self.mask is None else _part(self.mask, slab, 1)
        if not self.causal:
            state = self._absorbed(slab, k, v, mask, count, advance)
            for a, b in self._blocks(self.n_q):
                out = state.query(q[..., a:b, :], self.eps)
                self._write(target, slab, a, b, out)
                self._walked(count * (b - a), advance)
            return state
        state = self._start(slab, k, v)
        for a, b in self._blocks(self.n_q):
            out, state = linear_attention(
                q[..., a:b, :], k[..., a:b, :], v[..., a:b, :], self.feature_map, self.eps,
                causal=True, key_mask=None if mask is None else mask[..., a:b],
                state=state, return_state=True,
            )  # fmt: skip
            self._write(target, slab, a, b, out)
            self._walked(count * (b - a), advance)
        return state

    def _absorbed(
        self, slab: Index, k: Array, v: Array, mask: Array | None, count: int, advance: Any
    ) -> State:
        key = _aligned(self.batch, slab)
        if self._last is not None and self._last[0] == key:  # q alone has this axis
            self._walked(count * self.n_k, advance)
            return self._last[1]
        state = self._start(slab, k, v)
        for a, b in self._blocks(self.n_k):
            state.absorb(k[..., a:b, :], v[..., a:b, :], None if mask is None else mask[..., a:b])
            self._walked(count * (b - a), advance)
        self._last = key, state
        return state

    def _start(self, slab: Index, k: Array, v: Array) -> State:
        state = State.of(k[..., :0, :], v[..., :0, :], self.feature_map)
        if self.before is None:
            return state
        past = self._past
        return past[_aligned(past.batch_shape, slab)].merge(state)

    def _blocks(self, n: int) -> Iterator[tuple[int, int]]:
        cuts = [*range(0, n, self.block), n]
        return itertools.pairwise(cuts) if n else iter(())

    def _walked(self, positions: int, advance: Any) -> None:
        for x in self.inputs:
            x.release()
        advance(positions)

    def _write(self, target: Output, slab: Index, a: int, b: int, block: Array) -> None:
        """Rows a to b of a slab: pieces that lie together in the file are written together."""
        shape = tuple(s.stop - s.start for s in slab)
        block = np.broadcast_to(block, (*shape, b - a, self.d_v))
        if a == 0 and b == self.n_q:  # a slab's elements are consecutive
            first = _flat(self.lead, tuple(s.start for s in slab))
            target.write(first * self.n_q * self.d_v, block)
            return
        for index in np.ndindex(*shape):
            element = _flat(self.lead, tuple(s.start + i for s, i in zip(slab, index, strict=True)))
            target.write((element * self.n_q + a) * self.d_v, block[index])

    # States asked for

    def all_states(self) -> State:
        """A state of every batch element, to be filled."""
        D = self.k.shape[-1]
        kind = self._start(tuple(slice(0, 1) for _ in self.lead), self.k, self.v).dtype
        state = State.zeros(self.batch, D, self.d_v, self.feature_map, kind)
        if math.prod(self.lead) == 0 and self.before is not None:
            return self._past.merge(state)
        return state

    def put(self, all_states: State, slab: Index, state: State) -> None:
        """A slab's state into its place."""
        at = _aligned(self.batch, slab)
        all_states.kv[at] = state.kv
        all_states.k_sum[at] = state.k_sum
        if state.log_scale is not None and all_states.log_scale is not None:
            all_states.log_scale[at] = state.log_scale


def _aligned(own: tuple[int, ...], slab: Index) -> Index:
    """A slab of the output's leading axes as an index of an array that has fewer, or ones."""
    if not own:
        return ()
    whole = slice(None)
    return tuple(whole if n == 1 else s for n, s in zip(own, slab[-len(own) :], strict=True))


def _part(x: Array, slab: Index, inner: int) -> Array:
    return x[_aligned(x.shape[: x.ndim - inner], slab)]


def _flat(shape: tuple[int, ...], index: tuple[int, ...]) -> int:
    number = 0
    for n, i in zip(shape, index, strict=True):
        number = number * n + i
    return number


@contextlib.contextmanager
def _progress(total: int, quiet: bool) -> Iterator[Any]:
    """A bar on stderr, where that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield lambda positions: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = TextColumn("attend"), BarColumn(), TaskProgressColumn(), Remaining(compact=True)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("attend", total=total)
        yield lambda positions: bar.update(task, advance=positions)


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the work as SIGINT does, with its files cleaned up."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt("SIGTERM")

    try:
        previous = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
