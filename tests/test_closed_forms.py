"""Maps with a closed form: both orders, chunks, and the planner's choice."""

from __future__ import annotations

import functools
import itertools
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cases
import numpy as np
import pytest
from cases import CLOSED as MAPS
from cases import definition, inputs, normal, same_bits

from linattn import State, feature_maps, linear_attention, plan
from linattn.backends import closed
from linattn.plan import prefers_one_chunk, prefers_quadratic

Array = Any
C = 8.0

every_map = pytest.mark.parametrize("name", list(MAPS))


def causal(q: Array, k: Array, v: Array, found: Any, order: str, **options: Any) -> Array:
    """The causal form with the choice taken away."""
    out = np.empty((*q.shape[:-1], v.shape[-1]), q.dtype)
    given = {"key_mask": None, "cu_seqlens": None, "enable_gqa": False, "state": None} | options
    return closed.attend(
        q, k, v, found, found.eps, True, given["key_mask"], given["cu_seqlens"],
        given["enable_gqa"], True, given["state"], False, order, out,
    )  # fmt: skip


@every_map
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_both_orders_around_the_edges_of_blocks(name: str, dtype: str) -> None:
    found = MAPS[name]
    for n in (1, 255, 256, 257, 521, 1031):
        q, k, v = inputs(n, (), n, 3, 5, cases.DTYPES[dtype])
        expected, bound = definition(q, k, v, found)
        for order in ("linear", "quadratic", "auto"):
            out = linear_attention(q, k, v, found, order=order)  # type: ignore[arg-type]
            cases.close(out, expected, bound, C, (n, order))
        expected, bound = definition(q, k, v, found, causal=True)
        for order in ("linear", "quadratic"):
            cases.close(causal(q, k, v, found, order), expected, bound, C, (n, order))
        cases.close(linear_attention(q, k, v, found, causal=True), expected, bound, C, n)


def test_taylor_in_both_orders_on_both_sides_of_the_crossover() -> None:
    found, d = feature_maps.taylor(), 16
    D, row = found.width(d), found.row_operations(d)
    crossover = plan(1, 1, d, D=D, closed_form=True, row_operations=row).crossover
    assert (D, row, crossover) == (153, 24 * (1 + 16 + 2 * 136), 370)
    for n in (crossover // 3, crossover - 1, crossover, 3 * crossover):
        q, k, v = inputs(n, (2,), n, d, d, np.float32)
        expected, bound = definition(q, k, v, found)
        for order in ("linear", "quadratic", "auto"):
            out = linear_attention(q, k, v, found, order=order)  # type: ignore[arg-type]
            cases.close(out, expected, bound, C, (n, order))


@every_map
def test_with_everything(name: str) -> None:
    """Grouped heads, masks, packed sequences, states in and out, over several chunks."""
    found, n = MAPS[name], 600
    q, k, v = normal(1, 2, 4, n, 3), normal(2, 2, 2, n, 3), normal(3, 2, 2, n, 5)
    mask = np.random.default_rng(4).random((2, 1, n)) < 0.7
    cuts = [0, 3, 3, 280, n]
    shared: dict[str, Any] = {"enable_gqa": True, "key_mask": mask}
    kv = State.of(normal(5, 2, 2, 11, 3), normal(6, 2, 2, 11, 5), found)
    packed = State.of(normal(5, 4, 2, 2, 11, 3), normal(6, 4, 2, 2, 11, 5), found)
    for is_causal, (before, more) in itertools.product(
        (False, True),
        ((None, {}), (kv, {}), (None, {"cu_seqlens": cuts}), (packed, {"cu_seqlens": cuts})),
    ):
        options = {**shared, **more, "causal": is_causal}
        sums = None if before is None else (before.kv, before.k_sum)
        expected, bound = definition(q, k, v, found, **options, state=sums)
        out, after = linear_attention(q, k, v, found, **options, state=before, return_state=True)
        cases.close(out, expected, bound, C, (is_causal, more))
        if before is None:
            alone = linear_attention(q, k, v, found, **options)
            cases.close(alone, expected, bound, C, (is_causal, more))
        whole = State.of(k, v, found, key_mask=mask) if not more else None
        if whole is not None:
            whole = whole if before is None else whole + before
            np.testing.assert_allclose(after.kv, whole.kv, rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(after.k_sum, whole.k_sum, rtol=1e-9, atol=1e-9)
        assert after.batch_shape == ((4, 2, 2) if more else (2, 2))


@every_map
@pytest.mark.parametrize("order", ["linear", "quadratic"])
def test_prefix_over_chunks(name: str, order: str) -> None:
    found, n = MAPS[name], 600
    q, k, v = inputs(7, (2,), n, 3, 5, np.float32)
    out = causal(q, k, v, found, order)
    for t, bad in itertools.product((0, 100, 254, 255, 256, 511, 598), (np.nan, np.inf, 1e30)):
        for which in ((0,), (1,), (2,), (0, 1, 2)):
            spoilt = [q, k, v]
            for i in which:
                spoilt[i] = spoilt[i].copy()
                spoilt[i][:, t + 1 :: 3] = bad
            with np.errstate(all="ignore"):
                again = causal(*spoilt, found, order)
            same_bits(out[:, : t + 1], again[:, : t + 1], (t, bad, which))


@every_map
def test_beyond_the_range_of_float32(name: str) -> None:
    """Where scores leave it and the answer doesn't."""
    found = MAPS[name]
    q, k, v = inputs(8, (), 300, 3, 5, np.float32)
    k = k * np.float32(1e18)
    q = q * np.float32(1e3)
    for is_causal in (False, True):
        expected, bound = definition(q, k, v, found, causal=is_causal)
        for order in ("linear", "quadratic"):
            if is_causal:
                out = causal(q, k, v, found, order)
            else:
                out = linear_attention(q, k, v, found, order=order)  # type: ignore[arg-type]
            cases.close(out, expected, bound, C, (is_causal, order))


@every_map
def test_a_map_that_writes_into_nothing(name: str) -> None:
    """`project`, `prepare` and `kappa` are enough, and the same to the bit."""
    found = MAPS[name]

    class Plain(type(found)):  # type: ignore[misc]
        project_into = feature_maps.FeatureMap.project_into
        kappa_into = feature_maps.FeatureMap.kappa_into

    plain = Plain(**found.parameters)
    for dtype, is_causal, order in itertools.product(
        (np.float32, np.float64, np.float16), (False, True), ("linear", "quadratic")
    ):
        q, k, v = inputs(8, (2,), 600, 3, 5, dtype)
        if is_causal:
            same_bits(causal(q, k, v, plain, order), causal(q, k, v, found, order))
        else:
            out = linear_attention(q, k, v, plain, order=order)  # type: ignore[arg-type]
            same_bits(out, linear_attention(q, k, v, found, order=order))  # type: ignore[arg-type]


def test_memory_of_blocks_is_one_call_s() -> None:
    """Calls inside a call and calls of several threads; what a large one needed isn't kept."""
    found = feature_maps.taylor()
    q, k, v = inputs(11, (), 600, 5, 7, np.float32)
    orders = ("linear", "quadratic")
    expected = [linear_attention(q, k, v, found, order=order) for order in orders]  # type: ignore[call-overload]

    class Nested(feature_maps.taylor):  # type: ignore[misc]
        def prepare(self, x: Array) -> Array:
            linear_attention(k, q, v, found, order="quadratic")
            return super().prepare(x)

        def project_into(self, x: Array, out: Array) -> None:
            super().project_into(x, out)
            linear_attention(k, q, v, found, order="linear")

    def call(order: str) -> Array:
        return linear_attention(q, k, v, Nested(), order=order)  # type: ignore[call-overload]

    for _ in range(2):  # the second finds what the first has left
        for order, right in zip(orders, expected, strict=True):
            same_bits(call(order), right)
    with ThreadPoolExecutor(4) as pool:
        for answers in pool.map(lambda _: [call(order) for order in orders], range(8)):
            for answer, right in zip(answers, expected, strict=True):
                same_bits(answer, right)
    q, k, v = inputs(12, (), 300, 24, 3, np.float64)
    linear_attention(q, k, v, feature_maps.taylor(4), order="linear")
    kept = vars(closed._spare).get("arrays", {})
    assert sum(x.nbytes for x in kept.values()) <= closed.KEPT


def test_inputs_keep_their_bits_and_out_is_filled() -> None:
    found = feature_maps.taylor()
    q, k, v = inputs(9, (2,), 300, 5, 7, np.float16)
    state = State.of(k, v, found)
    held = [q, k, v, state.kv, state.k_sum]
    before = [x.copy() for x in held]
    for options in ({}, {"causal": True}, {"state": state}, {"order": "quadratic"}):
        out = np.full((2, 300, 7), np.nan, np.float16)
        assert linear_attention(q, k, v, found, **options, out=out) is out  # type: ignore[call-overload]
        same_bits(out, linear_attention(q, k, v, found, **options))  # type: ignore[call-overload]
    for x, y in zip(held, before, strict=True):
        same_bits(x, y)
    with pytest.raises(ValueError, match="a state with D = 3"):
        linear_attention(q, k, v, found, state=State.zeros((2,), 3, 7, found))


@every_map
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_states_in_blocks(name: str, dtype: str) -> None:
    """Of long keys at once, in parts of which some are short; broadcast keys, NaN where masked."""
    found, n, kind = MAPS[name], 600, cases.DTYPES[dtype]
    q, k, v = (
        normal(i, *s).astype(kind) for i, s in enumerate([(2, 3, 9, 3), (3, n, 3), (2, 1, n, 5)])
    )
    mask = np.random.default_rng(4).random((3, n)) < 0.7
    for m in (None, mask[0], mask):
        ks, vs = k.copy(), v.copy()
        if m is not None:
            hidden = ~m if m.ndim == 1 else ~m.any(0)
            ks[:, hidden], vs[..., hidden, :] = np.nan, np.inf
        expected, bound = definition(q, ks, vs, found, key_mask=m)
        state = State.of(ks, vs, found, key_mask=m)
        assert state.batch_shape == (2, 3)
        cases.close(state.query(q), expected, bound, C, m is None)
        parts = State.zeros((2, 3), state.D, 5, found, kind)
        for a, b in ((0, 37), (37, 37), (37, 340), (340, n)):
            part = None if m is None else m[..., a:b]
            assert parts.absorb(ks[:, a:b], vs[..., a:b, :], part) is parts
        cases.close(parts.query(q), expected, bound, C, m is None)
    shared = State.zeros((4, 2, 3), state.D, 5, found, k.dtype).absorb(k, v[0])
    for kv in shared.kv.reshape(8, 3, state.D, 5):
        same_bits(kv, State.of(k, v[0], found).kv)
    with pytest.raises(ValueError, match=f"expected {state.D} features"):
        parts.absorb(k[..., :2], v)


def test_a_state_beyond_the_range_of_float32() -> None:
    found = feature_maps.taylor()
    _, k, v = inputs(8, (), 300, 3, 5, np.float32)
    k = k * np.float32(1e25)
    state = State.of(k, v, found)
    right = State.of(k.astype(float), v.astype(float), found)
    np.testing.assert_allclose(state.kv, right.kv, rtol=1e-4, atol=1e-5 * abs(right.kv).max())
    np.testing.assert_allclose(state.k_sum, right.k_sum, rtol=1e-5, atol=1e-6 * right.k_sum.max())


def test_memory_of_a_state_does_not_grow() -> None:
    """A block of features at a time, whether it is made or changed."""
    found = feature_maps.taylor()

    def peak(n: int, call: Any) -> int:
        k = np.zeros((n, 64), np.float32)
        call(k[:257])
        tracemalloc.start()
        try:
            call(k)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    state = State.of(np.zeros((1, 64), np.float32), np.zeros((1, 64), np.float32), found)
    out = np.empty((4000, 64), np.float32)
    for call in (
        lambda k: State.of(k, k, found),
        lambda k: state.absorb(k, k),
        lambda k: state.query(k, out=out[: len(k)]),
    ):
        assert peak(4000, call) < 1.1 * peak(1000, call)
        assert peak(4000, call) < 0.25 * 4000 * state.D * 4


@every_map
def test_queries_in_blocks(name: str) -> None:
    """Of grouped heads and leading axes that the state hasn't got, each as by itself."""
    found, n = MAPS[name], 300
    state = State.of(normal(1, 3, 9, 3), normal(2, 3, 9, 5), found)
    q = normal(3, 4, 6, n, 3)
    for normalize in (True, False):
        whole = state.query(q, enable_gqa=True, normalize=normalize)
        few = state.query(q[:2, :, :10], enable_gqa=True, normalize=normalize)  # through the core
        np.testing.assert_allclose(whole[:2, :, :10], few, rtol=1e-9, atol=1e-12)
        head = state[1].query(q[3, 2], normalize=normalize)
        np.testing.assert_array_equal(whole[3, 2], head)
    with pytest.raises(ValueError, match="features"):
        state.query(q[..., :2], enable_gqa=True)


def test_the_plan_knows() -> None:
    taylor = feature_maps.taylor(packed=False)
    D = taylor.width(64)
    assert D == 4161
    row = taylor.row_operations(64)
    assert row == 24 * D
    price = functools.partial(plan, d_k=64, D=D, closed_form=True, row_operations=row)
    p = price(1024, 1024)
    assert p.order == "quadratic"
    assert p.quadratic.operations == 2 * 1024**2 * (64 + 64)
    assert p.linear.feature_operations == 2 * 1024 * row
    assert p.crossover == 4942 == -(-D * (128 + 24) // 128)
    assert plan(1024, 1024, 64, D=D, row_operations=row).order == "linear"
    assert price(16384, 16384).order == "linear"
    for n in (1, 255, 1024, 4000, 4941, 4942, 8322, 10136, 10137, 16384, 30000):
        p = price(n, n, causal=True)
        assert p.chunk == 256
        one = prefers_one_chunk(n, D, 64, 1, 64, row)
        assert (p.order == "quadratic") == one == (p.quadratic.compared < p.linear.compared)
        assert price(n, n, causal=True, state=True).order == "linear"
        assert (n < p.crossover) == one
        assert prefers_quadratic(n, n, D, 64, 1, 64, row) == (n < 4942)
    assert "all positions as one chunk" in str(price(1024, 1024, causal=True))


@pytest.mark.parametrize("causal", [False, True])
def test_a_call_goes_by_what_making_features_takes(causal: bool, monkeypatch: Any) -> None:
    """Where the products alone would be dearer in the quadratic order, and all is not."""
    found, d = feature_maps.taylor(), 16
    D, row = found.width(d), found.row_operations(d)
    n = 1 + plan(1, 1, d, D=D, closed_form=True, causal=causal).crossover
    price = plan(n, n, d, D=D, closed_form=True, causal=causal, row_operations=row)
    assert price.order == "quadratic"
    orders = []
    whole = closed.attend
    monkeypatch.setattr(closed, "attend", lambda *args: (orders.append(args[-2]), whole(*args))[1])
    q, k, v = inputs(1, (), n, d, d, np.float32)
    linear_attention(q, k, v, found, causal=causal)
    assert orders == ["quadratic"]
