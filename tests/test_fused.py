"""Projections that the core makes itself: no array of features, and what the array road gives."""

import numpy as np
import pytest

from linattn import State, backends, feature_maps, linear_attention
from linattn.backends import native

RNG = np.random.default_rng(11)
W, B = RNG.standard_normal((5, 7)), RNG.standard_normal(5)
MAPS = {
    "favor": feature_maps.favor(33, seed=2),
    "favor hyperbolic": feature_maps.favor(34, kind="hyperbolic", scale=0.5),
    "relu_random": feature_maps.relu_random(17),
    "hedgehog": feature_maps.hedgehog(W / 4, B),
    "t2r": feature_maps.t2r(W, B),
    "t2r without bias": feature_maps.t2r(W.astype(np.float32)),
    "performer_learned": feature_maps.performer_learned(W, B),
}

pytestmark = pytest.mark.skipif(native.extension is None, reason="needs the compiled core")


@pytest.fixture(params=MAPS)
def found(request):
    return MAPS[request.param]


def rows(n=97, d_v=3, dtype=np.float32):
    q, k = RNG.standard_normal((2, 2, n, 7))
    return q.astype(dtype), k.astype(dtype), RNG.standard_normal((2, n, d_v)).astype(dtype)


@pytest.fixture
def no_features(found, monkeypatch):
    """An array of features is an error."""
    monkeypatch.setattr(type(found), "project", refuse)


def refuse(self, x):
    raise AssertionError("features in an array of their own")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_equals_features_made_first(found, causal, dtype):
    q, k, v = rows(dtype=dtype)
    with backends.using("native"):
        got = linear_attention(q, k, v, found, causal=causal, order="linear")
    with backends.using("array"):
        wanted = linear_attention(q, k, v, found, causal=causal)
    assert got.dtype == dtype
    tolerance = {2: 4e-3, 4: 2e-4, 8: 1e-12}[np.dtype(dtype).itemsize]
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("no_features")
def test_every_verb_makes_them_inside(found):
    q, k, v = rows()
    whole, state = linear_attention(q, k, v, found, causal=True, return_state=True)
    mask = RNG.random((2, 97)) < 0.5
    linear_attention(q, k, v, found, key_mask=mask, order="linear")
    linear_attention(q, k, v, found, cu_seqlens=[0, 3, 3, 97], causal=True)
    made = State.of(k[:, :-1], v[:, :-1], found)
    last = made.copy().step(q[:, -1:], k[:, -1:], v[:, -1:])
    np.testing.assert_allclose(last, whole[:, -1:], rtol=1e-5, atol=1e-6)
    made.absorb(k[:, -1:], v[:, -1:])
    np.testing.assert_allclose(made.query(q[:, -1:]), whole[:, -1:], rtol=1e-5, atol=1e-6)
    again = linear_attention(q[:, :3], k[:, :3], v[:, :3], found, state=state, causal=True)
    assert again.shape == (2, 3, 3)


@pytest.mark.usefixtures("no_features")
def test_grouped_heads_and_a_given_array(found):
    q, k, v = rows()
    out = np.empty((4, 97, 3), np.float32)
    pairs = np.repeat(q, 2, 0)
    given = linear_attention(pairs, k, v, found, enable_gqa=True, order="linear", out=out)
    assert given is out
    np.testing.assert_array_equal(out[::2], linear_attention(q, k, v, found, order="linear"))
    np.testing.assert_array_equal(out[::2], out[1::2])


def test_weights_that_change_are_seen():
    """Nothing of an earlier call's weights is kept."""
    weight = W.copy()
    found = feature_maps.t2r(weight)
    q, k, v = rows()
    first = linear_attention(q, k, v, found, order="linear")
    weight *= -1
    second = linear_attention(q, k, v, found, order="linear")
    np.testing.assert_array_equal(
        second, linear_attention(q, k, v, feature_maps.t2r(-W), order="linear")
    )
    assert not np.array_equal(first, second)


def test_a_projection_of_another_width_is_declined():
    q, k, v = rows()
    whole = native.fused(MAPS["favor"], np.zeros((3, 5)))
    state = State.zeros(2, 33, 3, MAPS["favor"])
    assert native.attend(q, k, v, whole, 0.0, False, None, None, False, True, None, False,
                         "linear", None) is None  # fmt: skip
    assert native.absorb(state.kv, state.k_sum, state.log_scale, k, v, whole, None) is None
    assert native.attend(q, k, v, ("exp", "no projection"), 0.0, False, None, None, False, True,
                         None, False, "linear", None) is None  # fmt: skip


@pytest.mark.parametrize(
    ("weight", "bias"),
    [
        (np.zeros((2, 3), np.float32), None),
        (np.zeros(3), None),
        (np.zeros((0, 3)), None),
        (np.zeros((3, 2)).T, None),
        (np.zeros((2, 3)), np.zeros(2)),
        (np.zeros((2, 2, 3)), np.zeros(3)),
        (np.zeros((2, 2, 3)), np.zeros((3, 3))),
        (np.zeros((0, 2, 3)), None),
        ("weights", None),
    ],
)
def test_bad_weights_are_refused(weight, bias):
    with pytest.raises(TypeError, match="expected a contiguous float64 array"):
        native.extension.projection(weight, bias, 0.0, 0.0, False)


def test_weights_by_head(monkeypatch):
    """Each head as by itself, to the bit, in all verbs."""
    q, k, v = (np.stack([x, x[::-1]]) for x in rows())  # (2, heads, n, d)
    weights, biases = np.stack([W, -W]), np.stack([B, 2 * B])
    for kind in (feature_maps.t2r, feature_maps.hedgehog):
        both, alone = kind(weights, biases), [kind(*x) for x in zip(weights, biases, strict=True)]
        parts = [[x[:, h] for x in (q, k, v)] for h in range(2)]
        wanted = [
            linear_attention(*part, found, causal=True)
            for part, found in zip(parts, alone, strict=True)
        ]

        with monkeypatch.context() as patched:
            patched.setattr(kind, "project", refuse)
            whole = linear_attention(q, k, v, both, causal=True)
            state = State.zeros((2, 2), both.width(7), 3, both).absorb(
                k[..., :-1, :], v[..., :-1, :]
            )
            last = state.step(q[..., -1:, :], k[..., -1:, :], v[..., -1:, :])
            again = state.query(q[..., -1:, :])
        np.testing.assert_array_equal(whole, np.stack(wanted, 1))
        np.testing.assert_allclose(last, whole[..., -1:, :], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(again, whole[..., -1:, :], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shared", ["q", "k"])
def test_weights_by_head_over_fewer_heads_are_refused(shared):
    q, k, v = rows()
    q, k = (x[:1] if name == shared else x for name, x in (("q", q), ("k", k)))
    with pytest.raises(ValueError, match="acts row by row"):
        linear_attention(q, k, v, feature_maps.t2r(np.stack([W, -W])))


def test_weights_of_queries_are_projected_first():
    q, k, v = rows()
    found = feature_maps.t2r(W, B, query_weight=-W, query_bias=B)
    out = linear_attention(q, k, v, found, order="linear")
    by_hand = (np.maximum(x @ w.T + B, 0) for x, w in ((q, -W), (k, W)))
    np.testing.assert_allclose(
        out, linear_attention(*by_hand, v.astype(float), "identity", 1e-6), rtol=1e-4, atol=1e-5
    )
