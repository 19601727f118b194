"""The laws that every path obeys, as properties of all backends, dtypes, maps and forms.

The backends are the array one and the core once for each instruction set that it and this machine
have. "Equal" means within `cases.allowed` unless bits are named.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import ml_dtypes
import numpy as np
import pytest
from cases import C_EQUAL, DTYPES, MAPS, SIZES, close, definition, inputs, normal, same_bits

from linattn import State, backends, linear_attention, reference, set_num_threads

Array = Any

every_dtype = pytest.mark.parametrize("dtype", list(DTYPES))
every_map = pytest.mark.parametrize("name", list(MAPS))
wide = pytest.mark.parametrize("dtype", ["float32", "float64"])

NONNEGATIVE = [name for name in MAPS if name not in cases.SIGNED]
LONG = (1031, 17, 8)  # cut into pieces for threads


def sizes(name: str, dtype: str) -> list[tuple[int, int, int]]:
    """SIZES, and the long one where that isn't the same code again."""
    also = name in ("elu1", "exp", "mirror") and dtype in ("float32", "float64")
    return [*SIZES, LONG] if also else list(SIZES[:-1])


def steps(state: State, q: Array, k: Array, v: Array, **options: Any) -> Array:
    """The recurrent form: one position after the other."""
    rows = [
        state.step(q[..., t : t + 1, :], k[..., t : t + 1, :], v[..., t : t + 1, :], **options)
        for t in range(k.shape[-2])
    ]
    return np.concatenate(rows, axis=-2)


def empty(name: str, batch: tuple[int, ...], d_k: int, d_v: int, dtype: Any) -> State:
    return State.zeros(batch, cases.width(name, d_k), d_v, MAPS[name], dtype=dtype)


# ----------------------------------------------------------------------------- 1. the definition


@every_dtype
@every_map
def test_definition(backend: str, dtype: str, name: str) -> None:
    for n, d_k, d_v in sizes(name, dtype):
        q, k, v, expected, bound = cases.case(name, dtype, n, d_k, d_v, False)
        for order in ("linear", "quadratic", "auto"):
            if order == "auto" or n < 1000:
                out = linear_attention(q, k, v, MAPS[name], order=order)  # type: ignore[arg-type]
                assert out.dtype == DTYPES[dtype]
                close(out, expected, bound, what=(order, n, d_k, d_v))
        out = State.of(k, v, MAPS[name]).query(q)
        assert out.dtype == DTYPES[dtype]
        close(out, expected, bound, what=("state", n, d_k, d_v))


@every_dtype
@every_map
def test_definition_causal(backend: str, dtype: str, name: str) -> None:
    for n, d_k, d_v in sizes(name, dtype):
        q, k, v, expected, bound = cases.case(name, dtype, n, d_k, d_v, True)
        out = linear_attention(q, k, v, MAPS[name], causal=True)
        assert out.dtype == DTYPES[dtype]
        close(out, expected, bound, what=(n, d_k, d_v))
        if n < 100:
            out = steps(empty(name, (2,), d_k, d_v, DTYPES[dtype]), q, k, v)
            assert out.dtype == DTYPES[dtype]
            close(out, expected, bound, what=("steps", n, d_k, d_v))


@every_map
def test_definition_of_the_numerator(backend: str, name: str) -> None:
    for n, d_k, d_v in ((67, 3, 17), (131, 17, 8)):
        q, k, v = inputs(1, (2,), n, d_k, d_v, np.float32)
        for causal in (False, True):
            options = {"causal": causal, "normalize": False}
            expected, bound = definition(q, k, v, MAPS[name], **options)
            for order in ("auto",) if causal else ("linear", "quadratic"):
                close(
                    linear_attention(q, k, v, MAPS[name], **options, order=order), expected, bound
                )
        expected, bound = definition(q, k, v, MAPS[name], normalize=False)
        state = State.of(k, v, MAPS[name])
        close(state.query(q, normalize=False), expected, bound)
        top, below = state.query_parts(q)
        close(top, expected, bound)
        ones = np.ones((*v.shape[:-1], 1), v.dtype)
        close(below, *definition(q, k, ones, MAPS[name], normalize=False))


@pytest.mark.parametrize("eps", [0.0, 1e-6, 0.5, 1e3])
@every_map
def test_definition_with_any_eps(backend: str, name: str, eps: float) -> None:
    """eps stands in the true units of the denominator."""
    for shift in (0.0, -20.0):
        q, k, v = inputs(2, (), 37, 5, 7, np.float32)
        k = (k + shift).astype(np.float32)
        if name in ("relu", "squared_relu", "mirror", "identity") and shift:
            continue
        for causal in (False, True):
            expected, bound = definition(q, k, v, MAPS[name], eps, causal=causal)
            for order in ("auto",) if causal else ("linear", "quadratic"):
                out = linear_attention(q, k, v, MAPS[name], eps, causal=causal, order=order)  # type: ignore[arg-type]
                close(out, expected, bound, what=(shift, causal, order))
        state = State.of(k, v, MAPS[name])
        close(state.query(q, eps), *definition(q, k, v, MAPS[name], eps))
        rows = steps(empty(name, (), 5, 7, np.float32), q, k, v, eps=eps)
        close(rows, *definition(q, k, v, MAPS[name], eps, causal=True))


@every_map
def test_definition_far_from_the_origin(backend: str, name: str) -> None:
    """Where elu + 1, 1 + exp and 1 - sigmoid have cancelled, and where exp has overflowed."""
    for dtype in DTYPES.values():
        for far in (-12.0, 9.0) if name not in cases.EXPONENTIAL else (-600.0, 500.0):
            q, k, v = (x.astype(dtype) for x in inputs(3, (), 31, 3, 5, np.float64))
            k = (k + dtype.type(far)).astype(dtype)
            for causal in (False, True):
                expected, bound = definition(q, k, v, MAPS[name], causal=causal)
                out = linear_attention(q, k, v, MAPS[name], causal=causal)
                close(out, expected, bound, what=(far, causal, dtype))


RANGES = {
    # positive maps so far below 0 that products of two phi, or phi itself, are no normal numbers
    "vanishing": (("elu1", "softplus", "sigmoid"), lambda x: -45 - 10 * x, 1.0),
    "vanished": (("elu1", "softplus", "sigmoid"), lambda x: -86 - 8 * x, 1.0),
    # products, or only their sum, beyond the largest number
    "large": (("elu1", "relu", "softplus", "identity"), lambda x: 1e17 * 10 ** (3 * x), 1.0),
    "huge": (("elu1", "relu", "softplus", "identity"), lambda x: 1e25 * 10**x, 1.0),
    "only the denominator": (("elu1", "relu", "identity"), lambda x: 1e19 * (1 + x), 1e-12),
    "only the numerator": (("elu1", "relu", "identity"), lambda x: 1e9 * (1 + x), 1e22),
    "squares": (("squared_relu",), lambda x: 1e10 * (1 + x), 1.0),
    # exponents that no sum of floats can hold
    "exponents": (("exp", "hyperbolic"), lambda x: 3000 * (x - 0.5), 1.0),
    "far exponents": (("exp", "hyperbolic"), lambda x: 1e5 + 100 * x, 1.0),
}


@pytest.mark.parametrize("label", list(RANGES))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_definition_beyond_the_range_of_float(backend: str, dtype: str, label: str) -> None:
    """Where an answer exists, it's found, though the sums on the way leave float's range."""
    names, values, size = RANGES[label]
    n, d_k, d_v = 131, 3, 5
    for name in names:
        rng = np.random.default_rng(len(label))
        q, k = (values(rng.random((n, d_k))).astype(DTYPES[dtype]) for _ in range(2))
        v = (size * rng.normal(size=(n, d_v))).astype(DTYPES[dtype])
        for causal in (False, True):
            expected, bound = definition(q, k, v, MAPS[name], 0.0, causal=causal)
            for order in ("auto",) if causal else ("linear", "quadratic"):
                out = linear_attention(q, k, v, MAPS[name], 0.0, causal=causal, order=order)  # type: ignore[arg-type]
                close(out, expected, bound, what=(name, causal, order))
        rows = steps(empty(name, (), d_k, d_v, DTYPES[dtype]), q[:29], k[:29], v[:29], eps=0.0)
        close(rows, expected[:29], bound[:29], what=(name, "steps"))
        state = State.of(k, v, MAPS[name])
        close(state.query(q, 0.0), *definition(q, k, v, MAPS[name], 0.0), what=(name, "state"))


# --------------------------------------------------------------------------------------- 2. order


@every_map
@wide
def test_order(backend: str, dtype: str, name: str) -> None:
    """Linear and quadratic order agree, whatever else is asked for."""
    kind = DTYPES[dtype]
    q = normal(1, 2, 6, 71, 5, dtype=kind)
    k, v = normal(2, 2, 3, 131, 5, dtype=kind), normal(3, 2, 3, 131, 11, dtype=kind)
    mask = np.random.default_rng(4).random((2, 1, 131)) < 0.6
    packed = {"cu_seqlens": [0, 3, 3, 70, 71]}
    calls = [
        (q, k, v, {"enable_gqa": True}),
        (q, k, v, {"enable_gqa": True, "key_mask": mask, "normalize": False}),
        (q[:, :3], k, v, {"key_mask": mask[0, 0]}),
        (q[:, :3], k[..., :71, :], v[..., :71, :], {**packed, "key_mask": mask[..., :71]}),
        (q, k[..., :71, :], v[..., :71, :], {**packed, "enable_gqa": True}),
    ]
    for *arrays, options in calls:
        expected, bound = definition(*arrays, MAPS[name], **options)
        for order in ("linear", "quadratic"):
            out = linear_attention(*arrays, MAPS[name], order=order, **options)  # type: ignore[arg-type]
            close(out, expected, bound, what=(order, options))


# -------------------------------------------------------------------------------------- 3. monoid


def sums_are_equal(a: State, b: State, k: Array, v: Array, name: str, key_mask: Any = None) -> None:
    """S and Z of two states within the bound of each."""
    size = np.abs(k) if name in cases.SIGNED else k
    _, (kv, k_sum, power) = reference.double_sum(
        k[..., :1, :], size, np.abs(v), MAPS[name], key_mask=key_mask, return_state=True
    )
    power = np.zeros(k_sum.shape, np.int64) if power is None else power.astype(np.int64)
    # Each term carries the roundings of phi(k), of the product, and what phi makes of its argument.
    unit = (
        2 * cases.C * float(np.finfo(cases.working(a.dtype)).eps) * (2 + np.abs(k).max(initial=0))
    )

    def times(x: Array, log_scale: Any, deep: bool) -> Array:
        by = -power if log_scale is None else np.maximum(log_scale.astype(np.int64), -5000) - power
        by = np.clip(by, -5000, 5000).astype(np.int32)
        return np.ldexp(x, by[..., None] if deep else by)

    assert a.kv.shape == b.kv.shape == kv.shape
    one, other = times(a.kv, a.log_scale, True), times(b.kv, b.log_scale, True)
    assert (np.abs(one - other) <= unit * kv).all()
    one, other = times(a.k_sum, a.log_scale, False), times(b.k_sum, b.log_scale, False)
    assert (np.abs(one - other) <= unit * k_sum).all()


def merged(states: list[State], seed: int) -> State:
    """All of them, neighbours in a random grouping."""
    rng = np.random.default_rng(seed)
    states = list(states)
    while len(states) > 1:
        i = int(rng.integers(len(states) - 1))
        states[i : i + 2] = [states[i] + states[i + 1]]
    return states[0]


@every_map
@every_dtype
def test_monoid(backend: str, dtype: str, name: str) -> None:
    kind = DTYPES[dtype]
    for n, d_k, d_v in ((1, 3, 5), (131, 17, 3), (521, 8, 17)):
        _, k, v = inputs(n, (2,), n, d_k, d_v, kind)
        if name in cases.EXPONENTIAL:
            k = (k * kind.type(40)).astype(kind)
        whole = State.of(k, v, MAPS[name])
        for seed in range(4):
            parts = [
                State.of(k[:, at], v[:, at], MAPS[name]) for at in splits(n, 2 + 3 * seed, seed)
            ]
            together = merged(parts, seed)
            assert together.dtype == kind
            sums_are_equal(whole, together, k, v, name)
            grown = empty(name, (2,), d_k, d_v, kind)
            for at in splits(n, 2 + 3 * seed, seed):
                grown.absorb(k[:, at], v[:, at])
            sums_are_equal(whole, grown, k, v, name)


splits = cases.splits


@every_map
def test_monoid_zeros_change_no_bit(backend: str, name: str) -> None:
    _, k, v = inputs(5, (2,), 67, 3, 7, np.float32)
    nothing = empty(name, (2,), 3, 7, np.float32)
    state = State.of(k, v, MAPS[name])
    cases.same_states(state, state + nothing)
    cases.same_states(state, nothing + state)
    cases.same_states(nothing, nothing + nothing)
    cases.same_states(state + state, state.merge(state))
    # and neither does absorbing no keys, or masked ones
    before = state.copy()
    state.absorb(k[:, :0], v[:, :0])
    state.absorb(np.full_like(k, np.nan), v, key_mask=np.zeros(67, bool))
    cases.same_states(state, before)
    _, after = linear_attention(k, k, v, MAPS[name], state=state, key_mask=np.zeros(67, bool),
                                return_state=True)  # fmt: skip
    cases.same_states(after, before)


@every_map
def test_monoid_is_commutative(backend: str, name: str) -> None:
    _, k, v = inputs(6, (2,), 67, 3, 7, np.float32)
    far = np.float32(300 if name in cases.EXPONENTIAL else 1)
    a, b = State.of(k, v, MAPS[name]), State.of(k[:, ::-1] * far, v, MAPS[name])
    cases.same_states(a + b, b + a)


# -------------------------------------------------------------------------------------- 4. prefix

EDGES = (0, 1, 4, 5, 6, 11, 62, 63, 64, 65, 95, 96, 127, 128, 129, 255, 256, 257)


def poisons(dtype: Any) -> list[float]:
    top = float(ml_dtypes.finfo(dtype).max)
    return [np.nan, np.inf, -np.inf, top, -top, 88.0, -88.0]


def poison(x: Array, t: int, seed: int) -> Array:
    """x with nonsense after position t: everywhere, or here and there."""
    rng = np.random.default_rng(seed)
    x = x.copy()
    rest = x[..., t + 1 :, :]
    bad = np.array(poisons(x.dtype)).astype(x.dtype)
    kind = seed % 4
    if kind == 0:
        rest[...] = np.nan
    elif kind == 1:
        rest[...] = bad[rng.integers(len(bad), size=rest.shape)]
    elif kind == 2:
        rest *= x.dtype.type(20)
        rest[..., -1:, :] *= x.dtype.type(20)
    else:
        some = rng.random(rest.shape) < 0.05
        rest[some] = bad[rng.integers(len(bad), size=int(some.sum()))]
    return x


def prefix_holds(
    q: Array, k: Array, v: Array, name: str, ts: Any, seed: int, **options: Any
) -> None:
    """Outputs up to each t of ts keep their bits, whatever of q, k and v is poisoned after it."""
    out = linear_attention(q, k, v, MAPS[name], causal=True, **options)
    for i, t in enumerate(ts):
        with np.errstate(all="ignore"):
            spoilt = [
                poison(x, t, seed + 5 * i + j) if (seed + i) % 4 in (j, 3) else x
                for j, x in enumerate((k, v, q))
            ]
        changed = linear_attention(
            spoilt[2], spoilt[0], spoilt[1], MAPS[name], causal=True, **options
        )
        same_bits(out[..., : t + 1, :], changed[..., : t + 1, :], (name, t, i, seed))


@every_dtype
@every_map
def test_prefix(backend: str, dtype: str, name: str) -> None:
    kind = DTYPES[dtype]
    for n, d_k, d_v in ((131, 17, 8), (263, 3, 17)):
        q, k, v = inputs(n, (2,), n, d_k, d_v, kind)
        if name in cases.EXPONENTIAL:  # the scale rises now and then
            k = (k * kind.type(30)).astype(kind)
        for seed in (0, 1):
            prefix_holds(q, k, v, name, [t for t in EDGES if t < n - 1], seed)


@wide
@every_map
def test_prefix_of_sequences_in_pieces(backend: str, dtype: str, name: str) -> None:
    """Lengths that several threads share."""
    kind = DTYPES[dtype]
    for n, d_k, d_v in ((1031, 13, 7), (2053, 37, 41)):
        if backend == "array" and n > 1500:
            continue
        q, k, v = inputs(n, (), n, d_k, d_v, kind)
        if name in cases.EXPONENTIAL:
            k = (k * kind.type(30)).astype(kind)
        prefix_holds(q, k, v, name, (0, 255, 256, 511, 600, 767, 1023, n - 2), n)


@pytest.mark.parametrize(
    ("dtype", "name", "by", "first"),
    [
        ("float16", "elu1", 1, 1e4),
        ("float16", "softplus", 1, 1e4),
        ("bfloat16", "relu", 1, 1e38),
        ("float32", "exp", 40, 1),
        ("float32", "relu", 1, 1e38),
        ("float64", "exp", 300, 1),
    ],
)
def test_prefix_of_rows_that_overflow(
    backend: str, dtype: str, name: str, by: float, first: float
) -> None:
    """Rows of which one number is infinite keep the bits of the others."""
    n, kind = 523, DTYPES[dtype]
    q, k, v = (normal(i, n, d) for i, d in ((1, 5), (2, 5), (3, 7)))
    v[:, 0] *= first
    q, k, v = (x.astype(kind) for x in (q, by * k, v))
    options: dict[str, Any] = {"causal": True, "normalize": False}
    out = linear_attention(q, k, v, MAPS[name], **options)
    assert np.isinf(out).any()
    k[-1] = np.nan
    same_bits(out[:-1], linear_attention(q, k, v, MAPS[name], **options)[:-1])


@pytest.mark.parametrize("name", ["elu1", "exp", "identity", "mirror"])
def test_prefix_with_everything(backend: str, name: str) -> None:
    """Grouped heads, masks, a state before, packed sequences, numerators alone."""
    n = 149
    q, k, v = normal(1, 4, n, 5), normal(2, 2, n, 5), normal(3, 2, n, 7)
    mask = np.random.default_rng(4).random((2, n)) < 0.7
    before = State.of(normal(5, 2, 11, 5), normal(6, 2, 11, 7), MAPS[name])
    shared: dict[str, Any] = {"enable_gqa": True, "key_mask": mask}
    prefix_holds(q, k, v, name, EDGES[:14], 1, **shared)
    prefix_holds(q, k, v, name, EDGES[:14], 2, **shared, state=before, normalize=False)
    packed = State.of(normal(7, 3, 2, 11, 5), normal(8, 3, 2, 11, 7), MAPS[name])  # one a sequence
    shared |= {"cu_seqlens": [0, 64, 64, n], "state": packed}
    prefix_holds(q, k, v, name, EDGES[:14], 3, **shared)


@pytest.mark.parametrize("name", ["elu1", "exp"])
def test_sequences_do_not_see_each_other(backend: str, name: str) -> None:
    """Packed ones keep their bits whatever stands in their neighbours, before or behind."""
    n, cuts = 331, [0, 1, 1, 70, 300, 331]
    arrays = inputs(8, (2,), n, 5, 7, np.float32)
    for causal in (False, True):
        out = linear_attention(*arrays, MAPS[name], causal=causal, cu_seqlens=cuts)
        for a, b in zip(cuts[:-1], cuts[1:], strict=True):
            spoilt = [np.full_like(x, np.nan) for x in arrays]
            for x, good in zip(spoilt, arrays, strict=True):
                x[:, a:b] = good[:, a:b]
            changed = linear_attention(*spoilt, MAPS[name], causal=causal, cu_seqlens=cuts)
            same_bits(out[:, a:b], changed[:, a:b], (a, b))


# -------------------------------------------------------------------------------- 5. continuation


@every_map
@every_dtype
def test_continuation(backend: str, dtype: str, name: str, tmp_path: Path) -> None:
    """Prefill and steps, in any split, through files, equal one full pass."""
    kind = DTYPES[dtype]
    n, d_k, d_v = 71, 5, 7
    q, k, v = inputs(9, (2,), n, d_k, d_v, kind)
    if name in cases.EXPONENTIAL:
        k = (k * kind.type(20)).astype(kind)
    expected, bound = definition(q, k, v, MAPS[name], causal=True)
    for seed in range(3):
        state = empty(name, (2,), d_k, d_v, kind)
        rows = []
        for i, at in enumerate([*splits(n - 3, 5, seed), slice(n - 3, n)]):
            part = q[:, at], k[:, at], v[:, at]
            if at.stop == n:
                rows.append(steps(state, *part))
                continue
            kept = state.copy()
            out, after = linear_attention(
                *part, MAPS[name], causal=True, state=state, return_state=True
            )
            cases.same_states(state, kept)  # what was given is left as it is
            rows.append(out)
            state = after
            if i % 2:
                state.save(tmp_path / "state")
                again = State.load(tmp_path / "state", MAPS[name])
                cases.same_states(state, again)
                state = State.from_arrays(**again.arrays(), feature_map=MAPS[name], dtype=kind)
                cases.same_states(state, again)
        close(np.concatenate(rows, axis=-2), expected, bound, what=seed)
        sums_are_equal(state, State.of(k, v, MAPS[name]), k, v, name)


@every_map
def test_continuation_not_causal(backend: str, name: str) -> None:
    """Earlier keys as a state, whichever road they came."""
    n = 149
    q, k, v = inputs(10, (2,), n, 5, 7, np.float32)
    for at in (0, 1, 37, 148, 149):
        state = State.of(k[:, :at], v[:, :at], MAPS[name])
        out, after = linear_attention(
            q, k[:, at:], v[:, at:], MAPS[name], state=state, return_state=True
        )
        close(out, *definition(q, k, v, MAPS[name]), what=at)
        close(after.query(q), *definition(q, k, v, MAPS[name]), what=at)
        sums_are_equal(after, State.of(k, v, MAPS[name]), k, v, name)


@pytest.mark.parametrize("name", ["elu1", "exp", "mirror"])
@pytest.mark.parametrize("causal", [False, True])
def test_continuation_in_pieces(backend: str, name: str, causal: bool) -> None:
    """Long parts, which threads share, with a state before and after."""
    n, at = 2053, 1019
    q, k, v = inputs(11, (), n, 37, 41, np.float32)
    rows, state = [], None
    with threads_of(3):  # more than there are sequences, or the causal form cuts none
        for part in (slice(0, at), slice(at, n)):
            out, state = linear_attention(
                q[part], k[part], v[part], MAPS[name],
                causal=causal, state=state, return_state=True,
            )  # fmt: skip
            rows.append(out)
    sums_are_equal(state, State.of(k, v, MAPS[name]), k, v, name)
    expected, bound = definition(q, k, v, MAPS[name], causal=causal)
    if causal:
        close(np.concatenate(rows, axis=-2), expected, bound)
    else:
        close(rows[1], expected[at:], bound[at:])


@pytest.mark.parametrize("name", ["elu1", "exp", "mirror"])
@pytest.mark.parametrize("causal", [False, True])
def test_continuation_of_packed_sequences(backend: str, name: str, causal: bool) -> None:
    n, cuts = 83, [0, 3, 3, 40, 83]
    q, k, v = normal(1, 2, 4, n, 5), normal(2, 2, 2, n, 5), normal(3, 2, 2, n, 7)
    shared: dict[str, Any] = {"causal": causal, "enable_gqa": True, "cu_seqlens": cuts}
    _, state = linear_attention(q, k, v, MAPS[name], **shared, return_state=True)
    assert state.batch_shape == (4, 2, 2)
    out, after = linear_attention(q, k, v, MAPS[name], **shared, state=state, return_state=True)
    for i, (a, b) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
        part = q[..., a:b, :], k[..., a:b, :], v[..., a:b, :]
        alone = State.of(*part[1:], MAPS[name])
        sums_are_equal(state[i], alone, *part[1:], name)
        twice = [np.concatenate([x, x], axis=-2) for x in part]
        sums_are_equal(after[i], State.of(*twice[1:], MAPS[name]), *twice[1:], name)
        if causal:
            expected, bound = definition(*twice, MAPS[name], causal=True, enable_gqa=True)
            expected, bound = expected[..., b - a :, :], bound[..., b - a :, :]
        else:
            expected, bound = definition(part[0], *twice[1:], MAPS[name], enable_gqa=True)
        close(out[..., a:b, :], expected, bound, what=i)


# --------------------------------------------------------------------------------- 6. permutation


@every_map
@wide
def test_permutation(backend: str, dtype: str, name: str) -> None:
    kind = DTYPES[dtype]
    q, k, v = inputs(12, (2,), 263, 5, 7, kind)
    mask = np.random.default_rng(1).random(263) < 0.7
    for key_mask in (None, mask):
        expected, bound = definition(q, k, v, MAPS[name], key_mask=key_mask)
        for seed in range(3):
            p = np.random.default_rng(seed).permutation(263)
            here = None if key_mask is None else key_mask[p]
            for order in ("linear", "quadratic"):
                out = linear_attention(
                    q, k[:, p], v[:, p], MAPS[name], key_mask=here, order=order  # type: ignore[arg-type]
                )  # fmt: skip
                close(out, expected, bound)


# ---------------------------------------------------------------------- 7. constant and linearity


@pytest.mark.parametrize("name", NONNEGATIVE)
@every_dtype
def test_constant(backend: str, dtype: str, name: str) -> None:
    """An average of equal values is that value."""
    kind = DTYPES[dtype]
    lengths = ((1, 5), (67, 3), (263, 17), (1031, 5))
    for n, d_k in lengths if name in ("elu1", "exp") else lengths[:-1]:
        q, k, _ = inputs(n, (2,), n, d_k, 1, kind)
        k = k + kind.type(0.1)  # relu of a lone negative key would leave nothing to average
        v = np.broadcast_to(normal(n, 1, 7, dtype=kind), (2, n, 7))
        for causal in (False, True):
            expected, bound = definition(q, k, v, MAPS[name], 0.0, causal=causal)
            seen = expected != 0  # where any feature is shared by query and keys
            values = np.broadcast_to(v, expected.shape).astype(np.float64)
            assert seen.mean() > 0.5 or n == 1
            for order in ("auto",) if causal else ("linear", "quadratic"):
                out = linear_attention(q, k, v, MAPS[name], 0.0, causal=causal, order=order)  # type: ignore[arg-type]
                close(out, np.where(seen, values, 0), bound, what=(n, causal, order))


@every_map
@wide
def test_linearity(backend: str, dtype: str, name: str) -> None:
    """out(a v + b w) = a out(v) + b out(w), with a and b that round nothing."""
    kind = DTYPES[dtype]
    for n in (67, 1031) if name in ("elu1", "exp") else (67,):
        q, k, v = inputs(n, (2,), n, 5, 7, kind)
        w = np.round(normal(1, 2, n, 7) * 64).astype(kind) / kind.type(64)
        v = np.round(v * kind.type(64)) / kind.type(64)
        for normalize in (False, True):
            for causal in (False, True):
                options = {"causal": causal, "normalize": normalize}
                _, one = definition(q, k, v, MAPS[name], **options)
                _, two = definition(q, k, w, MAPS[name], **options)
                f = lambda values: linear_attention(q, k, values, MAPS[name], **options)  # noqa: B023, E731
                mixed = kind.type(4) * f(v) - kind.type(0.5) * f(w)
                close(
                    f(kind.type(4) * v - kind.type(0.5) * w),
                    mixed.astype(np.float64),
                    2 * (4 * one + 0.5 * two),
                    what=(n, options),
                )


# ---------------------------------------------------------------------------------------- 8. mask


def spoilt(k: Array, v: Array, mask: Array, seed: int) -> tuple[Array, Array]:
    """k and v with nonsense where mask is False."""
    k, v = k.copy(), v.copy()
    rng = np.random.default_rng(seed)
    bad = np.array(poisons(k.dtype)).astype(k.dtype)
    for x in (k, v):
        away = np.broadcast_to(~mask[..., None], x.shape)
        x[away] = bad[rng.integers(len(bad), size=int(away.sum()))]
    return k, v


def masks(n: int, batch: tuple[int, ...], seed: int) -> list[Array]:
    """Random ones, padding on either side, blocks of 64 and 256 left out, single keys, none."""
    rng = np.random.default_rng(seed)
    at = np.arange(n)
    return [
        rng.random((*batch, n)) < 0.5,
        rng.random((*batch, n)) < 0.02,
        np.broadcast_to(at < n // 3, (*batch, n)),
        np.broadcast_to(at >= n // 3, (*batch, n)),
        np.broadcast_to((at < 5) | (at >= 5 + 256), (*batch, n)),
        np.broadcast_to((at // 64) % 2 == 1, (*batch, n)),
        np.broadcast_to(at == n // 2, (*batch, n)),
        np.zeros((*batch, n), bool),
    ]


@every_map
@every_dtype
def test_mask(backend: str, dtype: str, name: str) -> None:
    """A masked key is as if removed, whatever it holds."""
    kind = DTYPES[dtype]
    for n, d_k, d_v in ((7, 3, 5), (149, 17, 8), (523, 5, 3)):
        q, k, v = inputs(n, (2,), n, d_k, d_v, kind)
        q = q[:, :61] if n > 149 else q
        for i, mask in enumerate(masks(n, (2,), n)):
            if n > 500 and i not in (0, 4, 5):
                continue
            expected, bound = definition(q, k, v, MAPS[name], key_mask=mask)
            bad = spoilt(k, v, mask, i)
            for order in ("linear", "quadratic"):
                out = linear_attention(q, *bad, MAPS[name], key_mask=mask, order=order)  # type: ignore[arg-type]
                close(out, expected, bound, what=(n, i, order))
                if not mask.any():
                    assert (out == 0).all()
            state = State.of(*bad, MAPS[name], key_mask=mask)
            close(state.query(q), expected, bound, what=(n, i, "state"))
            # removed, one batch element at a time: numbers of keys differ
            for b in range(2):
                kept = np.flatnonzero(mask[b])
                alone = definition(q[b], k[b, kept], v[b, kept], MAPS[name])
                close(out[b], *alone, what=(n, i, "removed"))


@every_map
@every_dtype
def test_mask_causal(backend: str, dtype: str, name: str) -> None:
    kind = DTYPES[dtype]
    for n, d_k, d_v in ((7, 3, 5), (149, 17, 8), (523, 5, 3)):
        q, k, v = inputs(n, (2,), n, d_k, d_v, kind)
        if name in cases.EXPONENTIAL:
            k = (k * kind.type(20)).astype(kind)
        for i, mask in enumerate(masks(n, (2,), n)):
            if n > 500 and i not in (0, 4, 5):
                continue
            expected, bound = definition(q, k, v, MAPS[name], key_mask=mask, causal=True)
            bad = spoilt(k, v, mask, i)
            out = linear_attention(q, *bad, MAPS[name], key_mask=mask, causal=True)
            close(out, expected, bound, what=(n, i))
            unseen = ~np.logical_or.accumulate(mask, axis=-1)
            assert (out[unseen] == 0).all()
            # and nothing of what it holds shows in the bits
            clean = [np.where(mask[..., None], x, x.dtype.type(0)) for x in (k, v)]
            same_bits(
                out, linear_attention(q, *clean, MAPS[name], key_mask=mask, causal=True), (n, i)
            )


@pytest.mark.parametrize("name", ["elu1", "exp"])
@pytest.mark.parametrize("causal", [False, True])
def test_mask_shapes(backend: str, name: str, causal: bool) -> None:
    """Every shape that is allowed, with any strides, means what it means broadcast."""
    n = 71
    q, k, v = normal(1, 2, 6, n, 5), normal(2, 2, 3, n, 5), normal(3, 2, 3, n, 7)
    full = np.random.default_rng(4).random((2, 3, n)) < 0.6
    for mask in (
        full[0, 0],
        full[:1, :1],
        full[:, :1],
        full[:1],
        full,
        np.asfortranarray(full),
        full[..., ::-1],
        full[0, 0, ::-1],
        np.broadcast_to(full[0, :1, :1], (2, 3, n)),
        np.broadcast_to(full[:, :, :1], (2, 3, n)),
        np.repeat(full, 3, axis=-1)[..., 1::3],
    ):
        every = np.broadcast_to(mask, (2, 3, n))
        bad = spoilt(k, v, every, 5)
        options: dict[str, Any] = {"causal": causal, "enable_gqa": True, "key_mask": mask}
        expected = definition(q, k, v, MAPS[name], **{**options, "key_mask": every})
        close(linear_attention(q, *bad, MAPS[name], **options), *expected, what=mask.shape)


@pytest.mark.parametrize("name", ["elu1", "exp", "identity", "mirror"])
@pytest.mark.parametrize("causal", [False, True])
def test_mask_as_padding(backend: str, name: str, causal: bool) -> None:
    """Left, right and no padding agree on the real positions."""
    n, room = 67, 149
    q, k, v = inputs(14, (), n, 5, 7, np.float32)
    expected, bound = definition(q, k, v, MAPS[name], causal=causal)
    close(linear_attention(q, k, v, MAPS[name], causal=causal), expected, bound)
    for at in (slice(0, n), slice(room - n, room), slice(23, 23 + n)):
        padded = []
        for x in (q, k, v):
            there = np.full((room, x.shape[-1]), np.nan, np.float32)
            there[at] = x
            padded.append(there)
        mask = np.zeros(room, bool)
        mask[at] = True
        out = linear_attention(*padded, MAPS[name], causal=causal, key_mask=mask)
        close(out[at], expected, bound, what=at)


def test_mask_of_softmax(backend: str) -> None:
    """The baseline obeys it too."""
    q, k, v = inputs(15, (2,), 149, 5, 7, np.float32)
    for i, mask in enumerate(masks(149, (2,), 1)):
        from linattn import softmax_attention

        bad = spoilt(k, v, mask, i)
        out = softmax_attention(q, *bad, key_mask=mask)
        for b in range(2):
            kept = np.flatnonzero(mask[b])
            scores = q[b].astype(np.float64) @ k[b, kept].T.astype(np.float64) / np.sqrt(5)
            weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-np.inf))
            with np.errstate(all="ignore"):
                mean = weights @ v[b, kept] / weights.sum(-1, keepdims=True)
            assert np.allclose(out[b], np.nan_to_num(mean), atol=2e-6, rtol=0)


# --------------------------------------------------------------------------------------- 9. batch


@every_map
@every_dtype
def test_batch(backend: str, dtype: str, name: str) -> None:
    """Each batch element equals that element alone, and grouped heads equal repeated ones."""
    kind = DTYPES[dtype]
    n = 67
    q, k, v = (
        normal(1, 2, 6, n, 5, dtype=kind),
        normal(2, 2, 3, n, 5, dtype=kind),
        normal(3, 2, 3, n, 7, dtype=kind),
    )
    mask = np.random.default_rng(4).random((2, 3, n)) < 0.7
    for causal in (False, True):
        options: dict[str, Any] = {"causal": causal}
        out = linear_attention(q, k, v, MAPS[name], enable_gqa=True, key_mask=mask, **options)
        repeated = [np.repeat(x, 2, axis=1) for x in (k, v, mask)]
        expected, bound = definition(q, *repeated[:2], MAPS[name], key_mask=repeated[2], **options)
        close(out, expected, bound, what="grouped")
        whole = linear_attention(q, *repeated[:2], MAPS[name], key_mask=repeated[2], **options)
        close(whole, expected, bound, what="repeated")
        for b, h in ((0, 0), (1, 3), (1, 5)):
            at = slice(b, b + 1), slice(h, h + 1)
            for cut in (at, (b, h)):  # with axes of 1, and without
                alone = linear_attention(
                    q[cut], *(x[cut] for x in repeated[:2]), MAPS[name],
                    key_mask=repeated[2][cut], **options,
                )  # fmt: skip
                close(alone, expected[cut], bound[cut], what="alone")


@pytest.mark.parametrize("name", ["elu1", "exp", "mirror"])
@pytest.mark.parametrize("causal", [False, True])
def test_batch_of_one_and_two(backend: str, name: str, causal: bool) -> None:
    """At lengths where one is cut into other pieces than two."""
    q, k, v = inputs(16, (2,), 1553, 17, 8, np.float32)
    expected, bound = definition(q, k, v, MAPS[name], causal=causal)
    close(linear_attention(q, k, v, MAPS[name], causal=causal), expected, bound)
    for b in range(2):
        close(linear_attention(q[b], k[b], v[b], MAPS[name], causal=causal), expected[b], bound[b])


@pytest.mark.parametrize("name", ["elu1", "exp"])
@pytest.mark.parametrize("causal", [False, True])
def test_batch_axes_broadcast(backend: str, name: str, causal: bool) -> None:
    """As numpy.matmul's do, states included."""
    n = 37
    shapes = [
        ((2, 3), (2, 3), (2, 3), (2, 3)),
        ((2, 3), (3,), (3,), (3,)),
        ((2, 3), (2, 1), (1, 3), ()),
        ((), (2, 3), (2, 3), (2, 3)),
        ((), (), (5,), ()),
        ((2, 1), (1, 3), (), (2, 3)),
        ((7, 1, 2, 1), (5, 1, 3), (1, 1), (2, 1)),
        ((3,), (), (), ()),
        ((2, 3), (), (), (2, 1)),
    ]
    for lead_q, lead_k, lead_v, lead_s in shapes:
        q, k, v = normal(1, *lead_q, n, 5), normal(2, *lead_k, n, 5), normal(3, *lead_v, n, 7)
        held = np.broadcast_shapes(lead_k, lead_v)
        lead = np.broadcast_shapes(lead_q, held)
        expected, bound = definition(q, k, v, MAPS[name], causal=causal)
        assert expected.shape == (*lead, n, 7)
        out, state = linear_attention(q, k, v, MAPS[name], causal=causal, return_state=True)
        assert state.batch_shape == held
        close(out, expected, bound)
        close(linear_attention(q, k, v, MAPS[name], causal=causal), expected, bound)
        before = State.of(normal(4, *lead_s, 11, 5), normal(5, *lead_s, 11, 7), MAPS[name])
        arrays = before.kv, before.k_sum, before.log_scale
        expected, bound = definition(q, k, v, MAPS[name], causal=causal, state=arrays)
        out, state = linear_attention(
            q, k, v, MAPS[name], causal=causal, state=before, return_state=True
        )
        assert state.batch_shape == np.broadcast_shapes(held, lead_s)
        close(out, expected, bound, what=(lead_q, lead_k, lead_v, lead_s))
        _, (kv, _, log_scale) = reference.double_sum(
            q, k, v, MAPS[name], state=arrays, return_state=True
        )
        if name == "exp":
            kv = np.ldexp(kv, log_scale[..., None])
            found = np.ldexp(state.kv, state.log_scale[..., None])
        else:
            found = state.kv
        assert np.allclose(found, kv, rtol=1e-12, atol=1e-12)


# -------------------------------------------------------------------------------------- 10. layout


def shifted(x: Array, by: int) -> Array:
    """x in memory that is off by some bytes."""
    room = np.zeros(x.nbytes + 64, np.uint8)
    start = (-room.ctypes.data) % 64 + by
    view = room[start : start + x.nbytes].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


def flipped(x: Array, axes: tuple[int, ...]) -> Array:
    """x with negative strides along these axes."""
    return np.flip(np.ascontiguousarray(np.flip(x, axes)), axes)


def moved(x: Array, order: tuple[int, ...]) -> Array:
    """x whose axes lie in memory in another order."""
    return np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))


def spread(x: Array, steps: tuple[int, ...]) -> Array:
    """x with gaps of NaN between its elements."""
    room = np.full([n * s for n, s in zip(x.shape, steps, strict=True)], np.nan, x.dtype)
    view = room[tuple(slice(s - 1, None, s) for s in steps)]
    view[...] = x
    return view


LAYOUTS: dict[str, Any] = {
    "fortran": np.asfortranarray,
    "heads last": lambda x: moved(x, (0, 2, 1, 3)),
    "features first": lambda x: moved(x, (3, 0, 1, 2)),
    "rows reversed": lambda x: flipped(x, (2,)),
    "features reversed": lambda x: flipped(x, (3,)),
    "all reversed": lambda x: flipped(x, (0, 1, 2, 3)),
    "every third row": lambda x: spread(x, (1, 1, 3, 1)),
    "every other feature": lambda x: spread(x, (1, 1, 1, 2)),
    "gaps everywhere": lambda x: spread(x, (2, 3, 2, 3)),
    "off by 1 byte": lambda x: shifted(x, 1),
    "off by an element": lambda x: shifted(x, x.itemsize),
    "off by half an element": lambda x: shifted(x, x.itemsize // 2),
}


def same(backend: str, a: Array, b: Array, bound: Array, what: Any) -> None:
    """The same bits from the core; NumPy's products may round other strides in another order."""
    if backend == "array":
        close(a, b.astype(np.float64), bound, what=what)
    else:
        same_bits(a, b, what)


@pytest.mark.parametrize("name", ["elu1", "exp", "softplus"])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_layout(backend: str, dtype: str, name: str) -> None:
    """Inputs of any strides and alignment give the bits of their contiguous copies."""
    for n, d_k, d_v in ((67, 8, 16), (71, 5, 7)):
        plain = inputs(17, (2, 3), n, d_k, d_v, DTYPES[dtype])
        mask = np.random.default_rng(1).random((2, 3, n)) < 0.8
        for causal in (False, True):
            options: dict[str, Any] = {"causal": causal, "key_mask": mask, "return_state": True}
            bound = reference.error_bound(*plain, MAPS[name], causal=causal, key_mask=mask)
            out, state = linear_attention(*plain, MAPS[name], **options)
            quad = linear_attention(*plain, MAPS[name], key_mask=mask, order="quadratic")
            for label, layout in LAYOUTS.items():
                strange = [layout(x) for x in plain]
                for x, y in zip(strange, plain, strict=True):
                    assert (x == y).all()
                    x.flags.writeable = False
                for which in ((0,), (1,), (2,), (0, 1, 2)):
                    arrays = [strange[i] if i in which else plain[i] for i in range(3)]
                    again, after = linear_attention(*arrays, MAPS[name], **options)
                    same(backend, out, again, bound, (label, which, causal))
                    if backend != "array":
                        cases.same_states(state, after, (label, which, causal))
                if not causal:
                    again = linear_attention(*strange, MAPS[name], key_mask=mask, order="quadratic")
                    same(backend, quad, again, bound, label)
                for x, y in zip(strange, plain, strict=True):
                    same_bits(np.array(x), y, label)


@pytest.mark.parametrize("name", ["elu1", "exp"])
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_layout_of_the_output(backend: str, dtype: str, name: str) -> None:
    """`out` of any strides is filled, to its last element and no further."""
    kind = DTYPES[dtype]
    for n, d_k, d_v in ((67, 8, 16), (71, 5, 7)):
        plain = inputs(18, (2, 3), n, d_k, d_v, kind)
        for options in ({"causal": True}, {"order": "linear"}, {"order": "quadratic"}):
            out = linear_attention(*plain, MAPS[name], **options)  # type: ignore[arg-type]
            blank = np.full(out.shape, np.nan, kind)
            for label, layout in {"plain": np.array, **LAYOUTS}.items():
                given = layout(blank)
                base = given if given.base is None else given.base
                guard = np.frombuffer(np.asarray(base).tobytes(), np.uint8)
                found = linear_attention(*plain, MAPS[name], out=given, **options)  # type: ignore[arg-type]
                assert found is given
                same_bits(np.array(given), out, (label, options))
                given[...] = blank
                left = np.frombuffer(np.asarray(base).tobytes(), np.uint8)
                same_bits(left, guard, (label, options))
        state = State.of(*plain[1:], MAPS[name])
        out, one = state.query(plain[0]), [x[..., :1, :] for x in plain]
        stepped = state.copy().step(*one)
        for layout in LAYOUTS.values():
            given = layout(np.full(out.shape, np.nan, kind))
            assert state.query(plain[0], out=given) is given
            same_bits(np.array(given), out)
            strange = [layout(x) for x in one]
            same_bits(state.copy().step(*strange), stepped)
            given = layout(np.full(stepped.shape, np.nan, kind))
            assert state.copy().step(*strange, out=given) is given
            same_bits(np.array(given), stepped)


@pytest.mark.parametrize("name", ["elu1", "exp"])
def test_layout_broadcast(backend: str, name: str) -> None:
    """Axes of stride 0."""
    q, k, v = inputs(19, (2, 3), 71, 8, 16, np.float32)
    for axis in range(4):
        views = []
        for x in (q, k, v):
            narrow = x[tuple(slice(0, 1) if a == axis else slice(None) for a in range(4))]
            views.append(np.broadcast_to(narrow, x.shape))
            assert views[-1].strides[axis] == 0
        for which in ((0,), (1,), (2,), (0, 1, 2)):
            arrays = [views[i] if i in which else (q, k, v)[i] for i in range(3)]
            for options in ({"causal": True}, {"order": "linear"}, {"order": "quadratic"}):
                out = linear_attention(*arrays, MAPS[name], **options)  # type: ignore[arg-type]
                copies = [np.ascontiguousarray(x) for x in arrays]
                again = linear_attention(*copies, MAPS[name], **options)  # type: ignore[arg-type]
                same(backend, out, again, np.abs(again).astype(np.float64), (axis, which))


@pytest.mark.parametrize("name", ["elu1", "exp"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_layout_foreign(dtype: str, name: str) -> None:
    """The other byte order, memory maps, subclasses and lists, on the way that users go."""
    kind = DTYPES[dtype]
    for backend in cases.BACKENDS:
        with cases.using(None if backend != "array" else "array"):
            q, k, v = inputs(20, (), 37, 5, 7, kind)
            out = linear_attention(q, k, v, MAPS[name], causal=True)
            swapped = [x.astype(x.dtype.newbyteorder()) for x in (q, k, v)]
            for which in ((0,), (1,), (2,), (0, 1, 2)):
                arrays = [swapped[i] if i in which else (q, k, v)[i] for i in range(3)]
                again = linear_attention(*arrays, MAPS[name], causal=True)
                assert again.dtype.isnative
                same_bits(out, again)
            views = [x.view(np.recarray) for x in (q, k, v)]
            again = linear_attention(*views, MAPS[name], causal=True)
            assert type(again) is np.ndarray
            same_bits(out, again)
            lists = [x.astype(np.float64).tolist() for x in (q, k, v)]
            same_bits(
                linear_attention(*lists, MAPS[name]),
                linear_attention(*(x.astype(np.float64) for x in (q, k, v)), MAPS[name]),
            )


def test_layout_of_a_map_of_a_file(backend: str, tmp_path: Path) -> None:
    q, k, v = inputs(21, (2,), 67, 5, 7, np.float32)
    for name, x in {"q": q, "k": k, "v": v}.items():
        np.save(tmp_path / f"{name}.npy", x)
    maps = [np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "qkv"]
    assert type(maps[0]) is np.memmap
    state = State.of(*maps[1:])
    for options in ({"causal": True}, {"state": state}):
        with cases.using("array" if backend == "array" else None):
            out = linear_attention(*maps, **options)
            again = linear_attention(q, k, v, **options)
        assert type(out) is np.ndarray
        same_bits(out, again)


def test_inputs_keep_their_bits(backend: str) -> None:
    q, k, v = inputs(22, (2, 3), 131, 5, 7, np.float32)
    mask = np.random.default_rng(1).random((2, 3, 131)) < 0.5
    k[0, 0, ~mask[0, 0]] = np.nan
    cuts = np.array([0, 7, 131])
    state = State.of(k, v, "exp", key_mask=mask)
    held = [q, k, v, mask, cuts, state.kv, state.k_sum, state.log_scale]
    before = [x.copy() for x in held]
    for x in held:
        x.flags.writeable = False
    for causal in (False, True):
        for name in ("elu1", "exp", "mirror"):
            linear_attention(q, k, v, MAPS[name], causal=causal, key_mask=mask, cu_seqlens=cuts)
        linear_attention(q, k, v, "exp", causal=causal, state=state, key_mask=mask)
        linear_attention(q, k, v, "exp", causal=causal, state=state, return_state=True)
    state.query(q)
    state.copy().absorb(k, v)
    state.copy().step(q[..., :1, :], k[..., :1, :], v[..., :1, :])
    state + state
    for x, y in zip(held, before, strict=True):
        same_bits(x, y)


# -------------------------------------------------------------------------------------- 11. length


LENGTHS = [("float32", name) for name in ("elu1", "relu", "exp", "sigmoid")]
LENGTHS += [("float16", "elu1"), ("bfloat16", "elu1")]


@pytest.mark.parametrize(("dtype", "name"), LENGTHS)
def test_length(backend: str, dtype: str, name: str) -> None:
    """2^24 + 3 equal keys are as good as 1,000: float32 sums would stand still before."""
    kind = DTYPES[dtype]
    q = np.array([[0.3, 1.7], [1.1, -0.2]]).astype(kind)
    key, value = np.array([[0.7, -1.3]]).astype(kind), np.array([[1.3]]).astype(kind)
    ones = np.ones((1, 1), kind)
    expected, bound = definition(q, key, value, MAPS[name], 0.0)  # n times above and below
    above = definition(q, key, value, MAPS[name], normalize=False)
    below = definition(q, key, ones, MAPS[name], normalize=False)
    for n in (1009, 2**24 + 3 if backend != "array" else 2**20 + 7):  # whose sums are float64
        k, v = np.broadcast_to(key, (n, 2)), np.broadcast_to(value, (n, 1))
        assert k.strides[0] == v.strides[0] == 0
        out, state = linear_attention(q, k, v, MAPS[name], 0.0, return_state=True)
        close(out, expected, bound, C_EQUAL, what=n)
        parts = state.query_parts(q)
        close(parts[0] / np.float32(n), *above, C_EQUAL, what=n)
        close(parts[1] / np.float32(n), *below, C_EQUAL, what=n)
        # and 1,009 more, one token at a time and all at once, on top of them
        more = state.copy()
        for _ in range(1009):
            more.step(q[:1], key, value, 0.0)
        few = np.broadcast_to(q[:1], (1009, 2)), k[:1009], v[:1009]
        rows, after = linear_attention(
            *few, MAPS[name], 0.0, causal=True, state=state, return_state=True
        )
        there = rows.shape
        close(rows, *(np.broadcast_to(x[:1], there) for x in (expected, bound)), C_EQUAL, what=n)
        for last in (more, after):
            grown = State(last.kv - state.kv, last.k_sum - state.k_sum, state.log_scale,
                          state.feature_map, kind)  # fmt: skip
            parts = grown.query_parts(q)
            close(parts[0] / np.float32(1009), *above, C_EQUAL, what=n)
            close(parts[1] / np.float32(1009), *below, C_EQUAL, what=n)


@pytest.mark.parametrize("name", ["elu1", "relu", "exp", "sigmoid"])
def test_length_of_the_array_backend_in_float64(name: str) -> None:
    """Nothing wider stands behind these sums: the array backend carries what roundings lose."""
    c = 4.0  # roundings of equal terms add up within a block, and there alone
    q = np.array([[0.3, 1.7], [1.1, -0.2]])
    key, value = np.array([[0.7, -1.3]]), np.array([[1.3, -0.6, 0.1]])
    expected, bound = definition(q, key, value, MAPS[name], 0.0)
    above = definition(q, key, value, MAPS[name], normalize=False)
    with cases.using("array"):
        for n in (1009, 10_007, 2**18 + 7):
            k, v = np.broadcast_to(key, (n, 2)), np.broadcast_to(value, (n, 3))
            for order in ("linear", "quadratic"):
                out = linear_attention(q, k, v, MAPS[name], 0.0, order=order)  # type: ignore[arg-type]
                close(out, expected, bound, c, what=(n, order))
                out = linear_attention(q, k, v, MAPS[name], order=order, normalize=False)  # type: ignore[arg-type]
                close(out / n, *above, c, what=(n, order, "numerator"))
            if n > 20_000:
                continue
            every = np.broadcast_to(q[:1], (n, 2))
            out = linear_attention(every, k, v, MAPS[name], 0.0, causal=True)
            close(out, *(np.broadcast_to(x[:1], (n, 3)) for x in (expected, bound)), c, what=n)
            out = linear_attention(every, k, v, MAPS[name], causal=True, normalize=False)
            close(out / np.arange(1, n + 1)[:, None],
                  *(np.broadcast_to(x[:1], (n, 3)) for x in above), c, what=n)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["elu1", "exp"])
def test_length_causal(backend: str, name: str) -> None:
    n = 2**24 + 3
    q = np.broadcast_to(np.float32([[1.1, -0.2]]), (n, 2))
    k = np.broadcast_to(np.float32([[0.7, -1.3]]), (n, 2))
    v = np.broadcast_to(np.float32([[1.3]]), (n, 1))
    expected, bound = definition(q[:1], k[:1], v[:1], MAPS[name], 0.0)
    out = linear_attention(q, k, v, MAPS[name], 0.0, causal=True)
    for at in (slice(0, 999), slice(n // 2, n // 2 + 999), slice(n - 999, n)):
        there = (999, 1)
        close(out[at], np.broadcast_to(expected, there), np.broadcast_to(bound, there), C_EQUAL)


@pytest.mark.parametrize("name", ["elu1", "exp", "identity"])
def test_length_of_random_inputs(backend: str, name: str) -> None:
    """The constant of law 1 stays from 100 to 100,000 keys."""
    q, k, v = inputs(23, (), 100_003, 3, 2, np.float32)
    for n in (101, 1009, 10_007, 100_003):
        if name == "identity":  # whose random denominators may vanish
            k = np.abs(k)
        few = q[:7]
        expected, bound = definition(few, k[:n], v[:n], MAPS[name])
        close(linear_attention(few, k[:n], v[:n], MAPS[name], order="linear"), expected, bound)
        if n > 20_000:
            continue
        last = slice(n - 7, n)
        out = linear_attention(q[:n], k[:n], v[:n], MAPS[name], causal=True)[last]
        for i in range(7):
            seen = n - 6 + i
            row = definition(q[seen - 1 : seen], k[:seen], v[:seen], MAPS[name])
            close(out[i : i + 1], *row, what=n)


# --------------------------------------------------------------------------------------- 13. dtype


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", NONNEGATIVE)
def test_dtype_neither_overflows_nor_vanishes(backend: str, dtype: str, name: str) -> None:
    """20,000 keys of 4.0 with values of 1.0 give 1.0, and so do keys of 2^-12."""
    kind, n = DTYPES[dtype], 20_000
    for size in (4.0, 2.0**-12, 120.0):
        q = np.full((3, 5), size, kind)
        k, v = np.broadcast_to(q[:1], (n, 5)), np.ones((n, 1), kind)
        for order in ("linear", "quadratic"):
            out = linear_attention(q, k, v, MAPS[name], 0.0, order=order)  # type: ignore[arg-type]
            assert out.dtype == kind
            assert (out == 1).all(), (size, order)
        q = np.broadcast_to(q[:1], (n, 5))
        out = linear_attention(q, k, v, MAPS[name], 0.0, causal=True)
        assert (out == 1).all(), size
        state = State.of(k, v, MAPS[name])
        assert (state.query(q[:2], 0.0) == 1).all(), size
        assert (state.step(q[:1], k[:1], v[:1], 0.0) == 1).all(), size


def test_dtype_promotes(backend: str) -> None:
    """Among the four as numpy.result_type does, and nothing is narrowed on the way."""
    for a, one in DTYPES.items():
        for b, two in DTYPES.items():
            if a == b:
                wider = a
            elif "float64" in (a, b):
                wider = "float64"
            else:
                wider = "float32"
            q, k, v = (
                normal(1, 7, 3, dtype=one),
                normal(2, 7, 3, dtype=two),
                normal(3, 7, 5, dtype=one),
            )
            for arrays in ((q, k, v), (k, q, v), (q, q, normal(3, 7, 5, dtype=two))):
                expected, bound = definition(*arrays, "elu1")
                out = linear_attention(*arrays)
                assert out.dtype == DTYPES[wider], (a, b)
                close(out, expected, bound, what=(a, b))
                state = State.of(*arrays[1:])
                same = arrays[1].dtype == arrays[2].dtype
                assert state.dtype == (arrays[1].dtype if same else DTYPES[wider])
                out = state.query(arrays[0])
                assert out.dtype == DTYPES[wider]
                if cases.working(state.dtype) != cases.working(out.dtype):
                    out = out.astype(state.dtype)  # the precision that its sums have
                close(out, expected, bound, what=(a, b))


# --------------------------------------------------------------------------------- 14. determinism


@every_dtype
@pytest.mark.parametrize("name", ["elu1", "exp", "mirror"])
def test_determinism(backend: str, dtype: str, name: str) -> None:
    """The same bits at every call; not causal, for every number of threads.

    A causal sequence is cut into pieces where threads would idle otherwise, so its bits may depend
    on their number.
    """
    arrays = inputs(24, (2,), 1553, 29, 31, DTYPES[dtype])
    calls: list[dict[str, Any]] = [
        {"causal": True, "return_state": True},
        {"order": "linear", "return_state": True},
        {"order": "quadratic"} if backend != "array" else {"order": "linear"},
    ]
    for options in calls:
        firsts: dict[Any, Any] = {}
        for threads in (1, 2, 3, 2, 7, 1, 3, 7):
            with threads_of(threads):
                result = linear_attention(*arrays, MAPS[name], **options)
            out, state = result if "return_state" in options else (result, None)
            first = firsts.setdefault(threads if options.get("causal") else None, (out, state))
            same_bits(out, first[0], (threads, options))
            if state is not None:
                cases.same_states(state, first[1], (threads, options))


class threads_of:
    """A number of threads, for the block."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __enter__(self) -> None:
        set_num_threads(self.n)

    def __exit__(self, *exc: object) -> None:
        from linattn import config

        if backends.native.extension is not None:
            backends.native.extension.set_num_threads(0)  # as if never set
        config._threads = None
