"""linear_attention and softmax_attention: what each argument means, on every backend."""

import inspect
import tracemalloc
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from cases import DTYPES, EPSILON, data

from linattn import (
    FeatureMap,
    State,
    backends,
    feature_maps,
    linear_attention,
    reference,
    softmax_attention,
)

B, H, G = 2, 3, 2  # batch, key heads, query heads for each of them
D, E = 5, 13
MAPS = feature_maps.names()

pytestmark = pytest.mark.usefixtures("either_backend")


def qkv(n=67, n_q=None, lead=(B, H), **how):
    n_q = n if n_q is None else n_q
    return data((*lead, n_q, D), (*lead, n, D), (*lead, n, E), **how)


def close(got, q, k, v, feature_map=None, eps=None, factor=8, **how):
    """Within the bound of rounding: the reference's, a multiple of the dtype's epsilon."""
    exact = reference.double_sum(q, k, v, feature_map, eps, **how)
    bound = reference.error_bound(q, k, v, feature_map, eps, **how)
    assert got.shape == exact.shape
    epsilon = EPSILON[got.dtype.name]
    limit = factor * epsilon * bound + 1e-7 * epsilon
    assert (np.abs(got.astype(np.float64) - exact) <= limit).all()


def bits(x):
    return np.ascontiguousarray(x).tobytes()


# The textbook's call


def test_signature():
    parameters = inspect.signature(linear_attention).parameters
    assert list(parameters) == [
        *("q", "k", "v", "feature_map", "eps", "causal", "key_mask", "cu_seqlens", "enable_gqa"),
        *("normalize", "state", "return_state", "order", "out"),
    ]
    kinds = [p.kind for p in parameters.values()]
    assert (
        kinds
        == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 5 + [inspect.Parameter.KEYWORD_ONLY] * 9
    )
    defaults = {p.name: p.default for p in parameters.values() if p.default is not p.empty}
    assert defaults == {
        **dict.fromkeys(("feature_map", "eps", "key_mask", "cu_seqlens", "state", "out")),
        **dict.fromkeys(("causal", "enable_gqa", "return_state"), False),
        "normalize": True,
        "order": "auto",
    }
    shared = inspect.signature(softmax_attention).parameters
    for name in set(parameters) & set(shared):
        assert shared[name].default == parameters[name].default


def test_textbook_code_runs_unchanged():
    def textbook(Q, K, V, feature_map, eps=1e-6):
        Q, K = feature_map(Q), feature_map(K)
        return Q @ (K.T @ V) / (Q @ K.sum(0) + eps)[:, None]

    Q, K, V = qkv(lead=())
    maps = [
        lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
        lambda x: np.concatenate([np.maximum(x, 0), np.maximum(-x, 0), x * x], axis=-1),
        np.exp,
    ]
    for phi in maps:
        for eps in (1e-6, 0.5):
            np.testing.assert_allclose(
                linear_attention(Q, K, V, phi, eps), textbook(Q, K, V, phi, eps), rtol=1e-12
            )
    np.testing.assert_allclose(linear_attention(Q, K, V), textbook(Q, K, V, maps[0]), rtol=1e-12)


# Every map, dtype, form and length


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", MAPS)
def test_maps_and_dtypes(name, dtype):
    for n in (1, 7, 131):
        q, k, v = qkv(n, dtype=dtype)
        for how in (
            {"order": "linear"},
            {"order": "quadratic"},
            {"causal": True},
        ):
            normalize = name != "identity"
            got = linear_attention(q, k, v, name, normalize=normalize, **how)
            assert got.dtype == dtype
            how.pop("order", None)
            close(got, q, k, v, name, normalize=normalize, **how)


@pytest.mark.parametrize("n", range(131))
def test_every_length(n):
    q, k, v = qkv(n, lead=(H,))
    for name in ("elu1", "exp"):
        close(linear_attention(q, k, v, name, causal=True), q, k, v, name, causal=True)
        close(linear_attention(q[:, :7], k, v, name), q[:, :7], k, v, name)


@pytest.mark.parametrize("d_v", [1, 3, 8, 17, 65])
@pytest.mark.parametrize("d_k", [1, 3, 8, 17, 65])
def test_every_width(d_k, d_v):
    q, k, v = data((H, 71, d_k), (H, 71, d_k), (H, 71, d_v))
    for order in ("linear", "quadratic"):
        close(linear_attention(q, k, v, order=order), q, k, v)
    close(linear_attention(q, k, v, "exp", causal=True), q, k, v, "exp", causal=True)


def test_lengths_that_differ_and_none():
    for n_q, n_k in [(1, 67), (67, 1), (131, 7), (7, 131), (0, 7), (7, 0), (0, 0)]:
        q, k, v = qkv(n_k, n_q)
        for order in ("auto", "linear", "quadratic"):
            for name in ("relu", "exp"):
                got = linear_attention(q, k, v, name, order=order)
                assert got.shape == (B, H, n_q, E)
                close(got, q, k, v, name)
                assert n_k > 0 or (got == 0).all()


# Leading axes


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((), (), ()),
        ((B, H), (H,), ()),
        ((), (H,), (B, 1)),
        ((1, H), (B, 1), (H,)),
        ((7, B, H), (B, 1), (1, 1, H)),
        ((H,), (), ()),
        ((B, H), (), (B, 1)),
    ],
    ids=str,
)
def test_broadcasting(q, k, v):
    q, k, v = data((*q, 67, D), (*k, 67, D), (*v, 67, E))
    for name in ("elu1", "exp"):
        for causal in (False, True):
            got, state = linear_attention(q, k, v, name, causal=causal, return_state=True)
            close(got, q, k, v, name, causal=causal)
            assert state.batch_shape == np.broadcast_shapes(k.shape[:-2], v.shape[:-2])
            close(state.query(q), q, k, v, name)
        close(linear_attention(q, k, v, name, order="quadratic"), q, k, v, name)


@pytest.mark.parametrize("lead", [((0,), (1,), ()), ((0, H), (H,), (1, 1)), ((1,), (), (0,))])
def test_a_batch_of_none(lead):
    q, k, v = (np.ones((*s, 7, d)) for s, d in zip(lead, (D, D, E), strict=True))
    with backends.using("array" if backends.serving() == "array" else None):  # the core may decline
        for name in ("elu1", "exp"):
            for how in ({}, {"order": "quadratic"}, {"causal": True}):
                shape = (*np.broadcast_shapes(*lead), 7, E)
                assert linear_attention(q, k, v, name, **how).shape == shape
    assert softmax_attention(q, k, v).shape == shape


def test_a_state_broadcasts_too():
    q, k, v = data((B, H, 67, D), (H, 67, D), (67, E))
    pk, pv = data((B, 1, 11, D), (B, 1, 11, E), seed=1)
    for name in ("elu1", "exp"):
        past = State.of(pk, pv, name)
        sums = (past.kv, past.k_sum, past.log_scale)
        for causal in (False, True):
            how = {"causal": causal}
            got, state = linear_attention(q, k, v, name, state=past, return_state=True, **how)
            close(got, q, k, v, name, state=sums, **how)
            assert state.batch_shape == (B, H)


def test_each_element_alone():
    q, k, v = qkv()
    whole = linear_attention(q, k, v, causal=True)
    for b in range(B):
        for h in range(H):
            alone = linear_attention(q[b, h], k[b, h], v[b, h], causal=True)
            np.testing.assert_allclose(alone, whole[b, h], rtol=1e-13)


def test_grouped_heads_are_repeated_heads():
    q, k, v = data((B, G * H, 67, D), (B, H, 67, D), (B, H, 67, E))
    mask = np.random.default_rng(1).random((B, 1, 67)) < 0.6
    for name in ("elu1", "exp"):
        for how in ({}, {"causal": True}, {"order": "quadratic"}):
            got = linear_attention(q, k, v, name, enable_gqa=True, key_mask=mask, **how)
            repeated = (np.repeat(x, G, axis=-3) for x in (k, v))
            same = linear_attention(q, *repeated, name, key_mask=mask, **how)
            np.testing.assert_allclose(got, same, rtol=1e-11, atol=1e-12)
        got, state = linear_attention(q, k, v, name, enable_gqa=True, return_state=True)
        assert state.batch_shape == (B, H)
        close(state.query(q, enable_gqa=True), q, k, v, name, enable_gqa=True)
    # heads of a batch of one, and one key head for all
    close(
        linear_attention(q[:1], k[0, :1], v[:, :1], enable_gqa=True),
        q[:1],
        k[0, :1],
        v[:, :1],
        enable_gqa=True,
    )


# Masks


@pytest.mark.parametrize("shape", [(67,), (B, H, 67), (B, 1, 67), (1, H, 67), (1, 1, 67)], ids=str)
def test_masked_keys_are_as_if_removed(shape):
    q, k, v = qkv()
    mask = np.random.default_rng(1).random(shape) < 0.5
    full = np.broadcast_to(mask, (B, H, 67))
    bad_k, bad_v = k.copy(), v.copy()
    bad_k[~full], bad_v[~full] = np.nan, -np.inf
    for name in ("elu1", "exp", lambda x: x * x):
        for how in ({"order": "linear"}, {"order": "quadratic"}):
            got = linear_attention(q, bad_k, bad_v, name, key_mask=mask, **how)
            for b in range(B):
                for h in range(H):
                    seen = full[b, h]
                    close(got[b, h], q[b, h], k[b, h][seen], v[b, h][seen], name)
        got = linear_attention(q, bad_k, bad_v, name, key_mask=mask, causal=True)
        close(got, q, k, v, name, key_mask=mask, causal=True)


def test_rows_that_see_nothing_are_0():
    q, k, v = qkv()
    k[:], v[:] = np.nan, np.nan
    for name in MAPS:
        for how in ({"order": "linear"}, {"order": "quadratic"}, {"causal": True}):
            got = linear_attention(q, k, v, name, key_mask=np.zeros(67, bool), **how)
            assert (got == 0).all()
    q, k, v = qkv(lead=())
    padded = linear_attention(q, k, v, "exp", key_mask=np.arange(67) >= 7, causal=True)
    assert (padded[:7] == 0).all()
    close(padded[7:], q[7:], k[7:], v[7:], "exp", causal=True)


def test_a_zero_denominator_gives_0():
    q, k, v = np.full((7, D), -1.0), np.full((11, D), 1.0), np.full((11, E), 2.0)
    for dtype in DTYPES.values():
        for eps in (0.0, 1e-6):
            for how in ({"order": "linear"}, {"order": "quadratic"}):
                x = [a.astype(dtype) for a in (q, k, v)]
                assert (linear_attention(*x, "relu", eps, **how) == 0).all()
            assert (linear_attention(x[1], -x[1], x[2], "relu", eps, causal=True) == 0).all()


# Causality


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("t", [0, 30, 63, 64, 129])
def test_the_future_changes_no_bit(name, t):
    q, k, v = qkv(137, dtype=np.float32)
    before = linear_attention(q, k, v, name, causal=True)
    for filling in (np.nan, np.inf, -np.inf, 300.0, 0.0):
        later = [x.copy() for x in (q, k, v)]
        for changed in ([1], [2], [0, 1, 2]):
            for i in changed:
                later[i][..., t + 1 :, :] = filling
            after = linear_attention(*later, name, causal=True)
            assert bits(after[..., : t + 1, :]) == bits(before[..., : t + 1, :])


def test_a_large_last_key():
    q, k, v = qkv(67, dtype=np.float32)
    before = linear_attention(q, k, v, "exp", causal=True)
    k[..., -1, :] *= 20
    after = linear_attention(q, k, v, "exp", causal=True)
    assert bits(before[..., :-1, :]) == bits(after[..., :-1, :])
    close(after, q, k, v, "exp", causal=True)


def test_rising_keys_cut_chunks():
    q, k, v = qkv(131, lead=(H,))
    k += np.linspace(0, 1000, 131)[:, None] * np.random.default_rng(2).choice([-1, 1, 5], (H, 1, D))
    q *= 100
    close(linear_attention(q, k, v, "exp", causal=True), q, k, v, "exp", causal=True)


def test_values_that_are_not_finite_reach_later_rows_alone():
    q, k, v = qkv(67, lead=())
    v[30, 2], v[50, 2], v[40, 3] = np.inf, np.nan, np.nan
    got = linear_attention(q, k, v, causal=True)
    assert np.isfinite(np.delete(got, [2, 3], axis=1)).all()
    assert np.isfinite(got[:30, 2]).all()
    assert (got[30:50, 2] == np.inf).all()
    assert np.isnan(got[50:, 2]).all()
    assert np.isfinite(got[:40, 3]).all()
    assert np.isnan(got[40:, 3]).all()


@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("order", ["linear", "quadratic", "causal"])
def test_rows_that_are_nan_throughout_give_nan(feature_map, order):
    """Not the 0 of a query that has seen no key: neither kind has an exponent of its own."""
    q, k, v = qkv(67, lead=())
    q[30] = np.nan
    how = {"causal": True} if order == "causal" else {"order": order}
    got = linear_attention(q, k, v, feature_map, **how)
    assert np.isnan(got[30]).all()
    assert np.isfinite(np.delete(got, 30, axis=0)).all()
    k[...] = np.nan
    assert np.isnan(linear_attention(q, k, v, feature_map, **how)).all()


@pytest.mark.parametrize("keys, values", [(1.0, 1.0), (1e20, 1e25), (-95.0, 1.0)], ids=str)
@pytest.mark.parametrize("n", [1, 64, 511, 512, 513])
def test_wanting_the_state_changes_no_bit(n, keys, values):
    """Though short sums go straight to the queries then, out of float32's range or not."""
    q, k, v = qkv(n)
    k = (np.abs(k) + np.float32(1)) * np.float32(keys)
    mask = np.arange(n) % 7 != 3
    for how in ({}, {"key_mask": mask}):
        out = linear_attention(q, k, v * np.float32(values), order="linear", **how)
        again, _ = linear_attention(q, k, v * np.float32(values), return_state=True, **how)
        np.testing.assert_array_equal(out, again)
        assert np.isfinite(out).all() and (n == 1 or (out != 0).all())


@pytest.mark.parametrize("splits", [[37, 42], [1, 2, 3], [64], [0, 67]], ids=str)
def test_in_parts(splits):
    q, k, v = qkv()
    for name in ("elu1", "exp", lambda x: np.concatenate([x, x * x, 1 + 0 * x], -1)):
        state, parts = None, []
        for a, b in zip([0, *splits], [*splits, 67], strict=True):
            rows = [x[..., a:b, :] for x in (q, k, v)]
            out, state = linear_attention(
                *rows, name, 1e-3, causal=True, state=state, return_state=True
            )
            parts.append(out)
        # not a fair bound for the signed map, whose denominators may be small
        if isinstance(name, str):
            close(np.concatenate(parts, -2), q, k, v, name, 1e-3, causal=True)
        whole, end = linear_attention(q, k, v, name, 1e-3, causal=True, return_state=True)
        np.testing.assert_allclose(np.concatenate(parts, -2), whole, rtol=1e-7, atol=1e-7)
        np.testing.assert_allclose(end.query(q, 0.5), state.query(q, 0.5), rtol=1e-7, atol=1e-7)


# Packed sequences


@pytest.mark.parametrize(
    "cuts", [[0, 67], [0, 3, 3, 7, 67], [0, 0, 64, 67, 67], np.int32([0, 1, 66, 67])], ids=str
)
@pytest.mark.parametrize("name", ["elu1", "exp"])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_are_apart(cuts, name, causal):
    q, k, v = qkv()
    mask = np.random.default_rng(1).random((B, 1, 67)) < 0.6
    how = {"causal": causal, "cu_seqlens": cuts, "key_mask": mask}
    got, state = linear_attention(q, k, v, name, return_state=True, **how)
    close(got, q, k, v, name, **how)
    assert state.batch_shape == (len(cuts) - 1, B, H)
    for i, (a, b) in enumerate(pairwise(cuts)):
        one = State.of(k[..., a:b, :], v[..., a:b, :], name, mask[..., a:b])
        np.testing.assert_allclose(state[i].query(q), one.query(q), rtol=1e-12, atol=1e-12)
    again, more = linear_attention(q, k, v, name, return_state=True, state=state, **how)
    close(again, q, k, v, name, state=(state.kv, state.k_sum, state.log_scale), **how)
    assert more.batch_shape == state.batch_shape


def test_packed_and_empty():
    q, k, v = qkv(0)
    got, state = linear_attention(q, k, v, cu_seqlens=[0, 0, 0], return_state=True)
    assert got.shape == (B, H, 0, E)
    assert (state.k_sum == np.zeros((2, B, H, D))).all()


# Numbers


def test_normalize_and_eps():
    q, k, v = qkv()
    for how in ({"order": "linear"}, {"order": "quadratic"}, {"causal": True}):
        c = {"causal": how.get("causal", False)}
        for name in MAPS:
            got = linear_attention(q, k, v, name, 7.0, normalize=False, **how)
            close(got, q, k, v, name, normalize=False, **c)
            if name != "identity":
                close(linear_attention(q, k, v, name, 100.0, **how), q, k, v, name, 100.0, **c)
    assert (linear_attention(q, k, v) == linear_attention(q, k, v, "elu1", 1e-6)).all()
    assert (linear_attention(q, k, v, "exp") == linear_attention(q, k, v, "exp", 0)).all()
    assert (linear_attention(q, k, v, eps=np.float32(0)) == linear_attention(q, k, v, eps=0)).all()


def test_small_features_follow_the_definition():
    q = k = np.full((1, D), -20.0, np.float32)
    v = np.full((1, E), 3.0, np.float32)
    squares = D * np.exp(-40.0)
    expected = 3 * squares / (squares + 1e-6)
    np.testing.assert_allclose(linear_attention(q, k, v), np.full((1, E), expected), rtol=1e-5)
    np.testing.assert_allclose(linear_attention(q, k, v, eps=0.0), v, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_many_large_keys_in_half_precision(dtype):
    k = np.full((20_000, D), 4.0, dtype)
    v = np.ones((20_000, 2), dtype)
    for name in ("elu1", "relu", "exp", "squared_relu"):
        full = linear_attention(k[:7], k, v, name, 0.0)
        causal = linear_attention(k, k, v, name, 0.0, causal=True)
        for got in (full, causal):
            assert (np.abs(got.astype(float) - 1) <= 64 * EPSILON[got.dtype.name]).all()
    if np.dtype(dtype).itemsize == 2:
        assert (linear_attention(k, k, v) == 1).all()


def test_error_does_not_grow_with_length():
    for n in (1_000, 1 << 18):
        k = np.broadcast_to(np.float32([[0.1] * D]), (n, D))
        v = np.broadcast_to(np.float32([[0.1, 1.0]]), (n, 2))
        got = linear_attention(k[:3], k, v)
        np.testing.assert_allclose(got, v[:3], rtol=32 * 2.0**-23)
        last = linear_attention(k, k, v, causal=True)[-3:]
        np.testing.assert_allclose(last, v[:3], rtol=32 * 2.0**-23)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_exp_of_large_keys(dtype):
    q, k = np.array([[-100, 100]], dtype), np.array([[100, -100]], dtype)
    v = np.array([[3]], dtype)
    for how in ({"order": "linear"}, {"order": "quadratic"}, {"causal": True}):
        for eps in (None, 1e-6):
            np.testing.assert_allclose(
                linear_attention(q, k, v, "exp", eps, **how).astype(float), [[3]], rtol=1e-5
            )


# Layout and types


@pytest.mark.parametrize("causal", [False, True])
def test_layouts(causal):
    q, k, v = qkv(67, dtype=np.float32)
    mask = np.random.default_rng(1).random((B, H, 67)) < 0.7
    expected = linear_attention(q, k, v, causal=causal, key_mask=mask)

    def odd(x):
        raw = np.zeros(x.nbytes + 1, np.uint8)[1:]
        unaligned = raw.view(x.dtype).reshape(x.shape)
        unaligned[...] = x
        yield unaligned
        yield np.asfortranarray(x)
        yield np.repeat(x, 3, axis=-1)[..., ::3]
        yield np.ascontiguousarray(x[..., ::-1, :])[..., ::-1, :]
        yield np.ascontiguousarray(np.moveaxis(x, -3, -2)).swapaxes(-3, -2)
        yield x.astype(x.dtype.newbyteorder())
        frozen = x.copy()
        frozen.flags.writeable = False
        yield frozen

    for a, b, c in zip(odd(q), odd(k), odd(v), strict=True):
        before = [bits(x) for x in (a, b, c)]
        got = linear_attention(a, b, c, causal=causal, key_mask=mask[..., ::-1][..., ::-1])
        assert got.dtype == np.float32
        assert got.dtype.isnative
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
        assert [bits(x) for x in (a, b, c)] == before
    one = q[:, :1], np.broadcast_to(k[:, :1], q.shape), np.broadcast_to(v[:1], v.shape)
    np.testing.assert_allclose(
        linear_attention(*one, causal=causal),
        linear_attention(*(x.copy() for x in one), causal=causal),
        rtol=1e-5,
        atol=1e-6,
    )


def test_mixed_dtypes_promote():
    q, k, v = qkv(7)
    half, brain, single = np.float16, ml_dtypes.bfloat16, np.float32
    for types, result in [
        ((half, half, single), single),
        ((half, brain, half), single),
        ((brain, brain, single), single),
        ((single, half, np.float64), np.float64),
    ]:
        mixed = [x.astype(t) for x, t in zip((q, k, v), types, strict=True)]
        got = linear_attention(*mixed)
        assert got.dtype == result
        close(got, *mixed)
    lists = linear_attention(q[0, 0].tolist(), k[0, 0].tolist(), v[0, 0].tolist())
    np.testing.assert_allclose(lists, linear_attention(q[0, 0], k[0, 0], v[0, 0]))


def test_a_state_takes_part_in_promotion():
    q, k, v = qkv(7, dtype=np.float16)
    state = State.zeros((B, H), D, E)
    got, new = linear_attention(q, k, v, state=state, return_state=True)
    assert got.dtype == new.dtype == np.float32


class Subclass(np.ndarray):
    pass


def test_subclasses_and_memory_maps(tmp_path):
    q, k, v = qkv(7)
    expected = linear_attention(q, k, v)
    assert (linear_attention(q.view(Subclass), k, v.view(Subclass)) == expected).all()
    np.save(tmp_path / "q.npy", q)
    got = linear_attention(np.load(tmp_path / "q.npy", mmap_mode="r"), k, v)
    assert type(got) is np.ndarray
    assert (got == expected).all()


@pytest.mark.parametrize("how", [{}, {"order": "quadratic"}, {"causal": True}], ids=str)
def test_out(how):
    q, k, v = qkv(67)
    for name in ("elu1", "exp", lambda x: np.float32(x * x)):
        expected = linear_attention(q, k, v, name, **how)
        for out in (
            np.full((B, H, 67, E), np.nan),
            np.full((B, 67, H, E), np.nan).swapaxes(1, 2),
            np.full((B, H, 67, 3 * E), np.nan)[..., ::3],
        ):
            assert linear_attention(q, k, v, name, out=out, **how) is out
            np.testing.assert_allclose(out, expected, rtol=1e-13)
    out = np.full((B, H, 67, E), np.nan)
    if how.get("order") != "quadratic":
        same, _ = linear_attention(q, k, v, out=out, return_state=True, **how)
        assert same is out


@pytest.mark.parametrize("how", [{}, {"order": "quadratic"}, {"causal": True}], ids=str)
@pytest.mark.parametrize("name", ["elu1", "exp", lambda x: np.float32(x * x)])
def test_out_in_a_file(how, name, tmp_path):
    """A memory map receives the result as any array does, from the core where it serves."""
    q, k, v = qkv(67)
    expected = linear_attention(q, k, v, name, **how)
    out = np.lib.format.open_memmap(tmp_path / "out.npy", "w+", q.dtype, expected.shape)
    assert linear_attention(q, k, v, name, out=out, **how) is out
    assert (np.load(tmp_path / "out.npy") == expected).all()

    state = State.of(k, v, name)
    expected, steps = state.query(q), state.copy().step(*(x[..., :1, :] for x in (q, k, v)))
    assert state.query(q, out=out) is out
    assert (np.load(tmp_path / "out.npy") == expected).all()
    one = out[..., :1, :]
    assert type(one) is np.memmap
    assert state.step(*(x[..., :1, :] for x in (q, k, v)), out=one) is one
    assert (np.load(tmp_path / "out.npy")[..., :1, :] == steps).all()
    assert softmax_attention(q, k, v, out=out) is out
    assert (np.load(tmp_path / "out.npy") == softmax_attention(q, k, v)).all()

    for other in (np.recarray, np.ma.MaskedArray):  # which write in ways of their own
        with pytest.raises(TypeError, match=r"out: expected a numpy array, got.*; pass out\.view"):
            linear_attention(q[0, 0], k[0, 0], v[0, 0], out=np.zeros((67, E)).view(other))


# Maps of one's own


def test_a_map_is_called_on_the_whole_q_and_k():
    seen = []

    def phi(x):
        seen.append(x.shape)
        return np.concatenate([np.exp(x), np.exp(-x)], axis=-1)

    q, k, v = qkv(67, 7)
    close(linear_attention(q, k, v, phi), q, k, v, phi)
    assert sorted(seen[:2]) == sorted([q.shape, k.shape])
    state = linear_attention(q, k, v, phi, return_state=True)[1]
    assert state.D == 2 * D
    close(state.query(q), q, k, v, phi)


def test_the_output_has_the_inputs_dtype_whatever_a_map_returns():
    q, k, v = qkv(67, dtype=np.float32)
    for phi in (
        lambda x: np.exp(x.astype(np.float64)),
        lambda x: np.exp(x).astype(np.float16),
        lambda x: np.exp(x).astype(">f4"),
    ):
        got, state = linear_attention(q, k, v, phi, causal=True, return_state=True)
        assert got.dtype == state.dtype == state.query(q).dtype == np.float32
        expected = linear_attention(
            q, k, v, lambda x, phi=phi: phi(x).astype(np.float32), causal=True
        )
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_a_callable_that_cannot_be_hashed():
    class Square:
        __hash__ = None

        def __call__(self, x):
            return x * x

    q, k, v = qkv(7)
    close(linear_attention(q, k, v, Square()), q, k, v, lambda x: x * x)


def test_a_map_with_a_projection_and_a_kernel():
    W = data((D, 17), seed=3)[0]
    made = FeatureMap("random exponentials", "exp", lambda x: x @ W, eps=0.0)
    q, k, v = qkv(67, scale=30.0)
    for how in ({"order": "linear"}, {"order": "quadratic"}, {"causal": True}):
        got = linear_attention(q, k, v, made, **how)
        c = {"causal": how.get("causal", False)}
        close(got, q @ W, k @ W, v, "exp", **c)


# Softmax attention


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 7, 257, 521])
def test_softmax_attention(n, causal, dtype):
    q, k, v = data((G * H, n, D), (H, n, D), (H, n, E), dtype=dtype)
    mask = np.random.default_rng(1).random((H, n)) < 0.5
    Q, K, V = q, np.repeat(k, G, 0), np.repeat(v, G, 0)
    Q, K, V = (x.astype(np.float64) for x in (Q, K, V))
    see = np.repeat(mask, G, 0)[..., None, :] & (np.tri(n, dtype=bool) if causal else True)
    weights = np.where(see, np.exp(Q @ K.swapaxes(-1, -2) / np.sqrt(D)), 0)
    sums = weights.sum(-1, keepdims=True)
    exact = weights @ V / np.where(sums == 0, 1, sums)
    k[~mask], v[~mask] = np.nan, np.nan
    out = np.full((G * H, n, E), np.nan, dtype)
    got = softmax_attention(q, k, v, causal=causal, key_mask=mask, enable_gqa=True, out=out)
    assert got is out
    tolerance = 20 * EPSILON[np.dtype(dtype).name] * np.abs(V).max()
    np.testing.assert_allclose(got.astype(float), exact, rtol=0, atol=tolerance)


def test_softmax_attention_of_large_scores():
    q, k, v = data((7, D), (1301, D), (1301, E))
    got = softmax_attention(100 * q, 100 * k, v)
    best = (q @ k.T).argmax(-1)
    np.testing.assert_allclose(got, v[best], atol=1e-6)
    assert (softmax_attention(q, k[:0], v[:0]) == 0).all()
    np.testing.assert_allclose(softmax_attention(q, k, v, scale=0.0), [v.mean(0)] * 7)


def test_softmax_attention_does_not_look_ahead():
    q, k, v = qkv(67)
    before = softmax_attention(q, k, v, causal=True)
    k[..., 30:, :], v[..., 31:, :] = 1e3, np.nan
    after = softmax_attention(q, k, v, causal=True)
    np.testing.assert_allclose(after[..., :30, :], before[..., :30, :], rtol=0, atol=1e-14)


# Memory


@pytest.mark.parametrize("name", ["elu1", "exp"])
@pytest.mark.parametrize(
    "how", [{"order": "linear"}, {"order": "quadratic"}, {"causal": True}], ids=str
)
def test_memory_does_not_grow(name, how):
    def peak(call, n, **how):
        x = np.zeros((n, D), np.float32)
        out = np.empty_like(x)
        call(x[:64], x[:64], x[:64], **how)
        tracemalloc.start()
        try:
            call(x, x, x, out=out, **how)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    for call, options in (
        (linear_attention, {"feature_map": name, **how}),
        (softmax_attention, {"causal": "causal" in how}),
    ):
        assert peak(call, 5_000, **options) < 1.5 * peak(call, 1_250, **options)
        assert peak(call, 1_250, **options) < 12 << 20
