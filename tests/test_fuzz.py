"""Any call that the contract allows, against the definition, on every backend.

150 calls that are the same in every run; with LINATTN_FUZZ=N in the environment N new ones.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import cases
import numpy as np
import pytest
from cases import C_EQUAL, DTYPES, MAPS, C, close, definition, same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from linattn import State, backends, linear_attention, reference

Array = Any

# -------------------------------------------------------------------------------------- the calls

# Around rows of tiles, vectors, and blocks of 64, 96, 128 and 256 positions.
POSITIONS = (0, 1, 2, 5, 6, 7, 12, 13, 31, 32, 63, 64, 65, 95, 96, 97, 127, 128, 129, 193, 257)
FEATURES = (1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33, 65)
LAYOUTS = (
    "plain",
    "fortran",
    "positions first",
    "features before positions",
    "rows backwards",
    "features backwards",
    "all backwards",
    "inside",
    "every second",
    "unaligned",
    "read only",
    "swapped bytes",
)
STILL = ("one batch element", "one row", "one feature", "one number")  # the rest has stride 0
ROOM = 12_000  # products of positions and heads: what the definition takes a moment for


@dataclass(frozen=True)
class Call:
    """All of a call but its numbers, which come from the seed."""

    seed: int
    feature_map: str
    dtypes: tuple[str, str, str]
    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    layouts: tuple[str, str, str]
    scale: float = 1.0
    shift: float = 0.0
    eps: float | None = None
    causal: bool = False
    gqa: bool = False
    normalize: bool = True
    mask: tuple[int, ...] | None = None
    mask_kind: str = ""
    cuts: tuple[int, ...] | None = None
    state: tuple[int, ...] | None = None
    earlier: int = 0
    return_state: bool = False
    order: str = "auto"
    out: str | None = None


def shrunk(draw: Any, shape: tuple[int, ...], drop: bool) -> tuple[int, ...]:
    """A shape that broadcasts to this one: some ones, some leading axes left out."""
    if draw(st.booleans()):
        return shape
    shape = tuple(1 if draw(st.integers(0, 3)) == 0 else size for size in shape)
    return shape[draw(st.integers(0, len(shape))) :] if drop else shape


@st.composite
def calls(draw: Any) -> Call:
    """Any call that the contract allows."""
    name = draw(st.sampled_from(list(MAPS)))
    dtype = draw(st.sampled_from(list(DTYPES)))
    dtypes = [dtype] * 3
    if draw(st.integers(0, 7)) == 0:
        dtypes = [draw(st.sampled_from(list(DTYPES))) for _ in range(3)]

    gqa = draw(st.integers(0, 3)) == 0
    axes = draw(st.integers(1 if gqa else 0, 3))
    batch = tuple(draw(st.integers(1, 3)) for _ in range(axes))
    groups = draw(st.integers(1, 3)) if gqa else 1
    heads = max(1, int(np.prod(batch))) * groups

    causal, packed = draw(st.booleans()), draw(st.integers(0, 3)) == 0
    n_q = n_k = draw(st.sampled_from([n for n in POSITIONS if n * n * heads <= 6 * ROOM]))
    if not causal and not packed:
        n_q = draw(st.sampled_from([n for n in POSITIONS if n * n_k * heads <= 6 * ROOM]))
    d_k, d_v = draw(st.sampled_from(FEATURES)), draw(st.sampled_from(FEATURES))

    k_batch, v_batch, q_batch = (shrunk(draw, batch, not gqa) for _ in range(3))
    state = earlier = cuts = None
    if packed:
        inner = draw(st.lists(st.integers(0, n_k), max_size=4))
        cuts = (0, *sorted(inner), n_k)
    if draw(st.integers(0, 3)) == 0:
        state, earlier = shrunk(draw, batch, not gqa), draw(st.sampled_from((0, 1, 9, 70)))
        if packed:
            state = (len(cuts) - 1, *state)
    if gqa and state is not None:  # no more heads than k and v: see test_more_heads_in_the_state
        state = (*state[:-1], min(state[-1], max(k_batch[-1], v_batch[-1])))
    if gqa:
        # with heads of k, v and state all shrunk to one, q's are still a multiple
        q_batch = (*q_batch[:-1], batch[-1] * groups)
    return_state = draw(st.integers(0, 3)) == 0

    mask = None
    if draw(st.booleans()):
        if draw(st.integers(0, 3)) == 0:
            mask = (n_k,)
        else:
            mask = (*(1 if draw(st.integers(0, 2)) == 0 else size for size in k_batch), n_k)

    linear = causal or state is not None or return_state
    return Call(
        seed=draw(st.integers(0, 2**32 - 1)),
        feature_map=name,
        dtypes=tuple(dtypes),
        q=(*q_batch, n_q, d_k),
        k=(*k_batch, n_k, d_k),
        v=(*v_batch, n_k, d_v),
        layouts=tuple(
            draw(st.sampled_from(STILL if draw(st.integers(0, 5)) == 0 else LAYOUTS))
            for _ in range(3)
        ),
        scale=draw(st.sampled_from((1.0, 1.0, 0.25, 20.0 if name in cases.EXPONENTIAL else 4.0))),
        shift=draw(st.sampled_from((0.0, 0.0, 0.0, -5.0, 5.0))),
        eps=draw(st.sampled_from((None, None, 0.0, 1e-6, 0.5, 1e3))),
        causal=causal,
        gqa=gqa,
        normalize=draw(st.integers(0, 3)) > 0,
        mask=mask,
        mask_kind=draw(st.sampled_from(("half", "few", "left", "right", "none", "all"))),
        cuts=cuts,
        state=state,
        earlier=earlier or 0,
        return_state=return_state,
        order=draw(st.sampled_from(("auto", "linear") if linear else ("linear", "quadratic"))),
        out=draw(st.sampled_from((None, None, *LAYOUTS[:9]))),
    )


# ---------------------------------------------------------------------------------- their numbers


def around(x: Array, by: int, step: int = 1) -> Array:
    """An uninitialised view like x inside of a larger array, whose rest is NaN."""
    room = np.full([size * step + 2 * by for size in x.shape], np.nan, x.dtype)
    return room[tuple(slice(by, by + size * step, step) for size in x.shape)]


def layout(x: Array, kind: str) -> Array:
    """The same numbers (or, for STILL, some of them) with other strides."""
    where: Array
    if kind == "plain":
        return x
    if kind == "fortran":
        return np.asfortranarray(x)
    if kind == "positions first":
        return np.moveaxis(np.ascontiguousarray(np.moveaxis(x, -2, 0)), 0, -2)
    if kind == "features before positions":
        return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
    if kind in ("rows backwards", "features backwards", "all backwards"):
        axes = {"rows": (-2,), "features": (-1,), "all": tuple(range(x.ndim))}[kind.split()[0]]
        return np.flip(np.ascontiguousarray(np.flip(x, axes)), axes)
    if kind in ("inside", "every second"):
        where = around(x, 3) if kind == "inside" else around(x, 1, 2)
        where[...] = x
        return where
    if kind == "unaligned":
        memory = np.zeros(x.nbytes + 1, np.uint8)
        memory[1:] = np.frombuffer(x.tobytes(), np.uint8)
        return memory[1:].view(x.dtype).reshape(x.shape)
    if kind == "read only":
        x = x.copy()
        x.flags.writeable = False
        return x
    if kind == "swapped bytes":
        return x.astype(x.dtype.newbyteorder()) if x.dtype.kind == "f" else x
    first = {
        "one batch element": (*(slice(0, 1),) * (x.ndim - 2), slice(None), slice(None)),
        "one row": (..., slice(0, 1), slice(None)),
        "one feature": (..., slice(0, 1)),
        "one number": (slice(0, 1),) * x.ndim,
    }[kind]
    return np.broadcast_to(x[first], x.shape) if x.size else x


def numbers(call: Call) -> Any:
    """q, k, v, the mask and the state."""
    rng = np.random.default_rng(call.seed)

    def draw(shape: tuple[int, ...], dtype: str, of_key: bool) -> Array:
        x = rng.normal(size=shape)
        return (x * call.scale + call.shift if of_key else x).astype(DTYPES[dtype])

    arrays = [
        layout(draw(shape, dtype, i == 1), kind)
        for i, (shape, dtype, kind) in enumerate(
            zip((call.q, call.k, call.v), call.dtypes, call.layouts, strict=True)
        )
    ]
    mask = None
    if call.mask is not None:
        at = np.broadcast_to(np.arange(call.mask[-1]), call.mask)
        third = call.mask[-1] // 3
        mask = {
            "half": rng.random(call.mask) < 0.5,
            "few": rng.random(call.mask) < 0.03,
            "left": at >= third,
            "right": at < third,
            "none": np.zeros(call.mask, bool),
            "all": np.broadcast_to(True, call.mask),
        }[call.mask_kind]
        if rng.random() < 0.3:
            mask = layout(mask, str(rng.choice(["fortran", "all backwards"])))
    state = None
    if call.state is not None:
        k = draw((*call.state, call.earlier, call.k[-1]), call.dtypes[1], True)
        v = draw((*call.state, call.earlier, call.v[-1]), call.dtypes[2], False)
        state = State.of(k, v, MAPS[call.feature_map])
    return arrays, mask, state


def spoilt(k: Array, mask: Array) -> Array:
    """k with NaN where it is masked."""
    k, seen = k.copy(), np.broadcast_to(mask, k.shape[:-1])
    k[~seen] = np.nan
    return k


# ---------------------------------------------------------------------------------- what they give


def true_sums(kv: Array, k_sum: Array, log_scale: Array | None, power: Array) -> Any:
    """S and Z in units of 2^power."""
    by = -power if log_scale is None else np.maximum(log_scale.astype(np.int64), -5000) - power
    by = np.clip(by, -5000, 5000).astype(np.int32)
    return np.ldexp(kv, by[..., None]), np.ldexp(k_sum, by)


def check_state(call: Call, after: State, arrays: Any, options: Any, state: Any) -> None:
    q, k, v = arrays
    _, right = reference.double_sum(
        q, k, v, MAPS[call.feature_map], **options, state=state, return_state=True
    )
    size = np.abs(k) if call.feature_map in cases.SIGNED else k
    with_sizes = None if state is None else (np.abs(state[0]), np.abs(state[1]), state[2])
    _, (kv, k_sum, power) = reference.double_sum(
        q, size, np.abs(v), MAPS[call.feature_map], **options, state=with_sizes, return_state=True
    )
    power = np.zeros(k_sum.shape, np.int64) if power is None else power.astype(np.int64)
    power = np.maximum(power, -5000)
    assert after.kv.shape == right[0].shape
    assert after.k_sum.shape == right[1].shape
    largest = np.abs(np.asarray(k, np.float64)).max(initial=0)
    unit = 2 * C_EQUAL * float(np.finfo(cases.working(after.dtype)).eps) * (2 + largest)
    found = true_sums(after.kv, after.k_sum, after.log_scale, power)
    expected = true_sums(*right, power)
    limits = true_sums(kv, k_sum, power, power)
    for a, b, limit, what in zip(found, expected, limits, ("kv", "k_sum"), strict=True):
        assert (np.abs(a - b) <= unit * limit).all(), f"{what} of the state: {call}"


def uneven(call: Call) -> bool:
    """Grouped heads of which k, v and the state don't have equal numbers.

    The core takes them from nobody: the array backend serves.
    """
    heads = {call.k[-3], call.v[-3]} if call.gqa else {1}
    return len(heads | ({call.state[-1]} if call.gqa and call.state is not None else set())) > 1


def promoted(dtypes: tuple[str, ...]) -> Any:
    """The dtype that holds all of them, float32 for the two halves."""
    if len(set(dtypes)) == 1:
        return DTYPES[dtypes[0]]
    return DTYPES["float64" if "float64" in dtypes else "float32"]


def check(call: Call) -> None:
    (q, k, v), mask, before = numbers(call)
    feature_map = MAPS[call.feature_map]
    given: dict[str, Any] = {
        "causal": call.causal,
        "key_mask": mask,
        "cu_seqlens": call.cuts,
        "enable_gqa": call.gqa,
    }
    sums = None if before is None else (before.kv, before.k_sum, before.log_scale)
    expected, bound = definition(
        q, k, v, feature_map, call.eps, **given, normalize=call.normalize, state=sums
    )
    kind = promoted(call.dtypes)
    c = C_EQUAL if set(call.layouts) & set(STILL) else C
    bad = k if mask is None else spoilt(k, mask)
    inputs = [x.copy() for x in (q, bad, v)]
    kept = None if before is None else before.copy()
    for backend in cases.BACKENDS:
        with cases.using(backend):
            if backend != "array" and uneven(call):
                backends._choose(None)
            out = None
            if call.out is not None and expected.size:  # see test_out_without_elements
                out = layout(np.full(expected.shape, np.nan, kind), call.out)
            result = linear_attention(
                q, bad, v, feature_map, call.eps, **given, normalize=call.normalize, state=before,
                return_state=call.return_state, order=call.order, out=out,  # type: ignore[arg-type]
            )  # fmt: skip
            result, after = result if call.return_state else (result, None)
            assert result.dtype == kind
            assert out is None or result is out
            close(result, expected, bound, c, (backend, call))
            if after is not None:
                check_state(call, after, (q, k, v), given, sums)
            if before is not None:
                cases.same_states(before, kept, (backend, call))
            if not (call.causal or call.cuts or call.state is not None):
                whole = State.of(bad, v, feature_map, key_mask=mask)
                found = whole.query(q, call.eps, call.gqa, normalize=call.normalize)
                # The sums have the precision of the keys, which saw no query.
                keys = promoted(call.dtypes[1:])
                found = found if keys == kind else found.astype(keys)
                close(found, expected, bound, c, (backend, "State.of and query", call))
    for x, was in zip((q, bad, v), inputs, strict=True):
        same_bits(np.asarray(x, x.dtype.newbyteorder("=")), was.astype(was.dtype.newbyteorder("=")))


def test_out_without_elements() -> None:
    none = np.zeros((0, 2), np.float32)
    out = np.empty((0, 2), np.float32)
    with cases.using("array"):  # or the core with cu_seqlens=[0, 0]
        assert linear_attention(none, none, none, out=out) is out


@pytest.mark.parametrize("causal", [False, True])
def test_more_heads_in_the_state(causal: bool) -> None:
    """One head of k and v broadcasts against those of a state, grouped as otherwise."""
    q, k, v = cases.normal(1, 4, 5, 3), cases.normal(2, 1, 5, 3), cases.normal(3, 1, 5, 2)
    state = State.of(cases.normal(4, 2, 6, 3), cases.normal(5, 2, 6, 2))
    options: dict[str, Any] = {"causal": causal, "enable_gqa": True}
    expected = definition(q, k, v, None, state=(state.kv, state.k_sum), **options)
    close(linear_attention(q, k, v, state=state, **options), *expected)


WANTED = os.environ.get("LINATTN_FUZZ")
COMMON: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


@settings(max_examples=int(WANTED or 150), derandomize=WANTED is None, **COMMON)
@given(calls())
def test_any_call(call: Call) -> None:
    check(call)


@pytest.mark.slow
@settings(max_examples=3000, **COMMON)
@given(calls())
def test_many_calls(call: Call) -> None:
    check(call)
