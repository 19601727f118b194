"""Projections that the core makes itself: no array of features, and what the array road gives."""

import pickle

import numpy as np
import pytest

from linattn import FeatureMap, State, attention, backends, feature_maps, linear_attention
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
    "performer_relu": feature_maps.performer_relu(17),
    "rfa": feature_maps.rfa(30, sigma=1.5),
    "softmax": feature_maps.softmax(),
    "hedgehog halves": feature_maps.hedgehog(W, B, normalise="halves"),
    "hedgehog joint": feature_maps.hedgehog(W, B, normalise="joint"),
    "dpfp": feature_maps.dpfp(),
    "dpfp around the ends": feature_maps.dpfp(15),
    "sketch": feature_maps.polynomial_sketch(18, degree=4, offset=0.5, scale=0.3),
    "sketch of odd width": feature_maps.polynomial_sketch(15, degree=2),
    "squared sketch": feature_maps.polynomial_sketch(9, degree=4, squared=True),
    "queries of their own": feature_maps.t2r(W, B, query_weight=B[:, None] + W, query_bias=-B),
    "cosformer": feature_maps.cosformer(200).at(range(97)),
}
SIGNED = ("rfa", "sketch", "sketch of odd width")  # whose denominators may come near 0

pytestmark = pytest.mark.skipif(native.extension is None, reason="needs the compiled core")


@pytest.fixture(params=MAPS)
def found(request):
    return MAPS[request.param]


@pytest.fixture
def normalize(request):
    return request.node.callspec.params["found"] not in SIGNED


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
def test_equals_features_made_first(found, normalize, causal, dtype):
    q, k, v = rows(dtype=dtype)
    how = {"causal": causal, "normalize": normalize}
    with backends.using("native"):
        got = linear_attention(q, k, v, found, order="linear", **how)
    with backends.using("array"):
        wanted = linear_attention(q, k, v, found, **how)
    assert got.dtype == dtype
    tolerance = {2: 4e-3, 4: 2e-4, 8: 1e-12}[np.dtype(dtype).itemsize]
    if not normalize:  # terms of either sign, of which so much may cancel
        tolerance *= max(1, float(abs(wanted).max()))
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("no_features")
def test_every_verb_makes_them_inside(found, normalize):
    q, k, v = rows()
    how = {"causal": True, "normalize": normalize}
    whole, state = linear_attention(q, k, v, found, return_state=True, **how)
    tolerance = {"rtol": 1e-5, "atol": 1e-6 * max(1, float(abs(whole).max()))}
    mask = RNG.random((2, 97)) < 0.5
    linear_attention(q, k, v, found, key_mask=mask, order="linear")
    packed = linear_attention(q, k, v, found, cu_seqlens=[0, 3, 3, 97], **how)
    for part in (slice(0, 3), slice(3, 97)):
        alone = linear_attention(*(x[:, part] for x in (q, k, v)), at(found, part), **how)
        np.testing.assert_array_equal(packed[:, part], alone)
    made = State.of(k[:, :-1], v[:, :-1], at(found, slice(0, 96)))
    end = slice(96, 97)
    after = made.copy()
    last = of(after, found, end).step(q[:, end], k[:, end], v[:, end], normalize=normalize)
    np.testing.assert_allclose(last, whole[:, end], **tolerance)
    of(made, found, end).absorb(k[:, end], v[:, end])
    again = of(made, found, end).query(q[:, end], normalize=normalize)
    np.testing.assert_allclose(again, whole[:, end], **tolerance)
    part = slice(0, 3)
    more = linear_attention(
        q[:, part], k[:, part], v[:, part], at(found, part), state=of(state, found, part), **how
    )
    assert more.shape == (2, 3, 3)


@pytest.mark.usefixtures("no_features")
@pytest.mark.parametrize("n", [1, 2, 31, 33, 64])
def test_the_quadratic_order_of_short_sequences(found, normalize, n):
    """Features of keys are made for each block of queries; both orders agree."""
    part = slice(0, n)
    q, k, v = (x[:, part] for x in rows())
    mask = RNG.random((2, n)) < 0.7
    here = at(found, part)
    for how in ({}, {"key_mask": mask}):
        a, b, either = (
            linear_attention(q, k, v, here, normalize=normalize, order=order, **how)
            for order in ("linear", "quadratic", "auto")
        )
        tolerance = {"rtol": 1e-5, "atol": 2e-6 * max(1, float(abs(a).max()))}
        np.testing.assert_allclose(a, b, **tolerance)
        assert np.array_equal(either, a) or np.array_equal(either, b)


@pytest.mark.usefixtures("no_features")
@pytest.mark.parametrize("n", [4, 30, 40, 63, 90, 97])
def test_an_automatic_order_makes_them_inside(found, n):
    part = slice(0, n)
    q, k, v = (x[:, part] for x in rows())
    linear_attention(q, k, v, at(found, part))


def test_the_quadratic_order_of_grouped_heads_and_packed_sequences():
    q, k, v = rows()
    found = feature_maps.t2r(W, B, query_weight=W + B[:, None])
    pairs = np.repeat(q, 2, 0)[:, :50]
    grouped = linear_attention(pairs, k, v, found, enable_gqa=True, order="quadratic")
    single = linear_attention(q[:, :50], k, v, found, order="linear")
    np.testing.assert_allclose(grouped[::2], single, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(grouped[::2], grouped[1::2])
    here = MAPS["cosformer"]
    cuts = [0, 40, 40, 97]
    packed = linear_attention(q, k, v, here, cu_seqlens=cuts, order="quadratic")
    again = linear_attention(q, k, v, here, cu_seqlens=cuts, order="linear")
    np.testing.assert_allclose(packed, again, rtol=1e-5, atol=1e-6)


def at(found, part):
    """The map for some of the rows."""
    if not found.positional:
        return found
    return found.at(found.positions[part])


def of(state, found, part):
    return state.at(found.positions[part]) if found.positional else state


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
        native.extension.projection(2, weight, bias, 0.0, 0.0, False, False, "none", 0.0, 1, None)


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
            few = [x[..., :20, :] for x in (q, k, v)]
            orders = [linear_attention(*few, both, order=o) for o in ("linear", "quadratic")]
        np.testing.assert_allclose(*orders, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(whole, np.stack(wanted, 1))
        np.testing.assert_allclose(last, whole[..., -1:, :], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(again, whole[..., -1:, :], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shared", ["q", "k"])
def test_weights_by_head_over_fewer_heads_are_refused(shared):
    q, k, v = rows()
    q, k = (x[:1] if name == shared else x for name, x in (("q", q), ("k", k)))
    with pytest.raises(ValueError, match="acts row by row"):
        linear_attention(q, k, v, feature_maps.t2r(np.stack([W, -W])))


def test_weights_of_queries():
    q, k, v = rows()
    found = feature_maps.t2r(W, B, query_weight=-W, query_bias=B)
    out = linear_attention(q, k, v, found, order="linear")
    by_hand = (np.maximum(x @ w.T + B, 0) for x, w in ((q, -W), (k, W)))
    np.testing.assert_allclose(
        out, linear_attention(*by_hand, v.astype(float), "identity", 1e-6), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("shared", ["q", "k"])
def test_weights_of_queries_by_head(monkeypatch, shared):
    """Heads of their own on one side, one weight for all on the other."""
    q, k, v = (np.stack([x, x[::-1]]) for x in rows())
    weights, biases = np.stack([W, -W]), np.stack([B, 2 * B])

    def found(h):
        own, own_bias = weights[h], biases[h]
        if shared == "q":
            return feature_maps.t2r(own, own_bias, query_weight=W, query_bias=B)
        return feature_maps.t2r(W, B, query_weight=own, query_bias=own_bias)

    wanted = [linear_attention(q[:, h], k[:, h], v[:, h], found(h), order="linear") for h in (0, 1)]
    monkeypatch.setattr(feature_maps.t2r, "project", refuse)
    whole = linear_attention(q, k, v, found(slice(None)), order="linear")
    np.testing.assert_array_equal(whole, np.stack(wanted, 1))


def test_an_empty_direction_stays_one():
    """A row of zeros has no length; its features are those of 0."""
    q, k, v = rows(5)
    q[:, 0], k[:, 2] = 0, 0
    found = feature_maps.rfa(64)
    got = linear_attention(q, k, v, found, order="linear", normalize=False)
    phi = [found(x.astype(float)) for x in (q, k)]
    np.testing.assert_allclose(got, phi[0] @ phi[1].swapaxes(-1, -2) @ v, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_lengths_whose_squares_leave_the_range(size):
    q, k, v = rows(9)
    found = feature_maps.rfa(64, sigma=2.0)
    got = linear_attention((q * size).astype("f"), (k * size).astype("f"), v, found, order="linear")
    np.testing.assert_allclose(got, linear_attention(q, k, v, found), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["softmax", "hedgehog halves", "hedgehog joint", "rfa", "dpfp"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row(name, bad):
    q, k, v = rows()
    clean = linear_attention(q, k, v, MAPS[name], order="linear")
    q[0, 3, 2] = bad
    got = linear_attention(q, k, v, MAPS[name], order="linear")
    with backends.using("array"), np.errstate(all="ignore"):
        wanted = linear_attention(q, k, v, MAPS[name])
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-3)
    got[0, 3], clean[0, 3] = 0, 0
    np.testing.assert_array_equal(got, clean)


@pytest.mark.parametrize(
    "positions", [None, [0.0] * 96, np.zeros((2, 97)), [0] * 96 + [201], [-1] * 97]
)
def test_positions_that_the_core_does_not_take(positions):
    """Left to the road of arrays, which takes them or words the error."""
    found = feature_maps.cosformer(200)
    found = found if positions is None else found.at(positions)
    q, k, v = rows()
    if isinstance(positions, np.ndarray):
        got = linear_attention(q, k, v, found, order="linear")
        plain = linear_attention(q, k, v, found.at([0] * 97), order="linear")
        np.testing.assert_allclose(got, plain, rtol=1e-5, atol=1e-6)
    else:
        with pytest.raises(ValueError, match="positions: expected|cosformer needs"):
            linear_attention(q, k, v, found, order="linear")


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ({"finish": "sharp"}, "finish: expected none, lifted"),
        ({"times": 0}, "steps that fit"),
        ({"finish": "spectra", "times": 2, "weight": np.zeros((3, 5))}, "steps that fit"),
        ({"finish": "spectra", "weight": np.zeros((3, 4)), "mirrored": True}, "steps that fit"),
        ({"finish": "spectra"}, "steps that fit"),
        ({"finish": "squares", "weight": np.zeros((3, 4)), "shift": 1.0}, "steps that fit"),
        ({"finish": "halves"}, "steps that fit"),
        ({"finish": "neighbours", "times": 2**61}, "steps that fit"),
        ({"finish": "waves", "inputs": 2**62}, "steps that fit"),
        ({"weight": np.zeros((4, 4))}, "as many rows as there are inputs"),
        ({"bias": np.zeros(3)}, "expected one where there is a bias"),
        ({"inputs": 0}, "inputs >= 1"),
        ({"finish": "turned"}, "angles: expected a contiguous float64 array"),
        ({"finish": "turned", "angles": np.zeros((3, 3))}, "angles: expected a contiguous"),
    ],
)
def test_steps_that_do_not_fit_are_refused(steps, message):
    plain = {"inputs": 3, "weight": None, "bias": None, "square": 0.0, "shift": 0.0,
             "mirrored": False, "unit": False, "finish": "none", "amount": 0.0, "times": 1,
             "angles": None}  # fmt: skip
    with pytest.raises((TypeError, ValueError), match=message):
        native.extension.projection(**plain | steps)


def test_projections_that_do_not_go_together_are_declined():
    """Keys and queries may differ in their weights alone."""
    q, k, v = rows()
    keys = native.fused(feature_maps.t2r(W, B), k)
    others = [native.fused(found, k) for found in (MAPS["dpfp"], feature_maps.t2r(W[:4]))]
    assert all(
        native.attend(q, k, v, (*keys, other[1]), 0.0, False, None, None, False, True, None, False,
                      "linear", None) is None
        for other in others
    )  # fmt: skip


@pytest.mark.parametrize("small", ["q", "k", "both"])
@pytest.mark.parametrize("causal", [False, True])
def test_products_too_small_for_float(small, causal):
    """Rows whose features vanish in float32 have their weights all the same."""
    q, k, v = rows()
    q = q * np.float32(1e-25) if small != "k" else q
    k = k * np.float32(1e-25) if small != "q" else k
    found, how = (
        MAPS["dpfp"],
        {"eps": 0.0, "causal": causal, "order": "auto" if causal else "linear"},
    )
    got = linear_attention(q, k, v, found, **how)
    exact = linear_attention(*(x.astype(float) for x in (q, k, v)), found, **how)
    assert (exact != 0).mean() > 0.9
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["softmax", "hedgehog joint"])
def test_a_nan_is_in_all_features_of_its_row(name):
    """As the sum over features is: a state tells it in every one of them."""
    k, v = rows(5)[1:]
    k[0, 3, 2] = np.nan
    k[1] = 0
    for road in ("native", "array"):
        with backends.using(road):
            state = State.of(k, v, MAPS[name])
        assert np.isnan(state.k_sum[0]).all() and np.isfinite(state.k_sum[1]).all()


class Doubled:
    """A project of one's own that the core can make."""

    def __init__(self, times):
        self.made = feature_maps.Recipe(weight=np.eye(7) * times)

    def __call__(self, x):
        return x * self.made.weight[0, 0]

    def recipe(self, d_k):
        return self.made


def test_one_recipe_for_several_kernels_and_widths():
    q, k, v = rows()
    step = Doubled(2.0)
    for kernel in ("relu", "exp", "relu"):
        got = linear_attention(q, k, v, FeatureMap("own", kernel, step), order="linear")
        wanted = linear_attention(2 * q, 2 * k, v, kernel, order="linear", eps=1e-6)
        np.testing.assert_array_equal(got, wanted)
    for width in (7, 5, 7):
        part = [x[..., :width] for x in (q, k)]
        whole = native.fused(MAPS["softmax"], part[1])
        made = native.attend(*part, v, whole, 0.0, False, None, None, False, True, None, False,
                             "linear", None)  # fmt: skip
        assert made is not None


def test_queries_are_projected_by_what_is_given_for_them():
    q, k, v = rows()
    keys, queries = Doubled(2.0), Doubled(3.0)
    wanted = linear_attention(3 * q, 2 * k, v, "relu", order="linear")
    for own in (queries, queries.__call__):  # a method says nothing of how it is made
        found = FeatureMap("own", "relu", keys, project_queries=own)
        got = linear_attention(q, k, v, found, order="linear")
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_a_family_made_of_another_has_its_own_projection():
    with_another = type("With", (feature_maps.softmax,), {"project": lambda self, x: x * 2})
    q, k, v = rows()
    found = with_another()
    assert not found.inside and found.recipe(7) is None
    got = linear_attention(q, k, v, found, order="linear")
    np.testing.assert_array_equal(got, linear_attention(2 * q, 2 * k, v, "exp", order="linear"))


@pytest.mark.parametrize("name", [name for name, found in MAPS.items() if not found.learned])
def test_rows_without_features_are_refused_in_words(name):
    found = MAPS[name]
    state = State.zeros(2, found.width(7), 3, found)
    empty = np.zeros((2, 5, 0), np.float32)
    with pytest.raises(ValueError, match="at least one feature"):
        state.query(empty)
    with pytest.raises(ValueError, match="at least one feature"):
        state.absorb(empty, np.zeros((2, 5, 3), np.float32))


@pytest.mark.parametrize("found", [MAPS["dpfp"], MAPS["sketch"], "squared_relu"], ids=str)
@pytest.mark.parametrize("size", [1e-25, 1e-12])
def test_keys_too_small_for_float_are_in_a_state(found, size):
    """A state is double: what vanishes in float32 is made in double, one key at a time too."""
    k, v = rows(40)[1:]
    k *= np.float32(size)
    wide = [x.astype(float) for x in (k, v)]
    exact = State.of(*wide, found)
    one_by_one = State.zeros(2, exact.D, 3, exact.feature_map)
    for t in range(40):
        one_by_one.step(k[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1])
    largest = abs(exact.kv).max()
    assert largest > 0
    for state in (State.of(k, v, found), one_by_one):
        np.testing.assert_allclose(state.kv / largest, exact.kv / largest, rtol=0, atol=1e-5)


def test_weights_are_converted_once():
    """For as long as they are the same numbers."""
    weight, bias, other = W.copy(), B.copy(), -W
    found = feature_maps.hedgehog(weight, bias, query_weight=other, normalise="halves")
    keys, queries = found.recipe(7), found.query_recipe(7)
    assert found.recipe(7) is keys and found.query_recipe(7) is queries
    bias[2] += 1
    assert found.recipe(7) is not keys and found.query_recipe(7) is queries
    other[1, 1] += 1
    assert found.query_recipe(7) is not queries
    again = pickle.loads(pickle.dumps(found))
    assert again == found and again.recipe(7) is again.recipe(7)


def test_calls_go_straight_to_the_core(found, monkeypatch):
    """As those of a kernel do, without the checks that word errors; a name is as good as a map."""
    q, k, v = rows()
    wanted, state = linear_attention(q, k, v, found, causal=True, return_state=True)
    long_road = attention._attention
    monkeypatch.setattr(attention, "_attention", refuse)
    np.testing.assert_array_equal(linear_attention(q, k, v, found, causal=True), wanted)
    linear_attention(q, k, v, found, state=state)
    if not found.learned and not found.positional:
        by_name = linear_attention(q, k, v, found.name, causal=True, state=State.zeros(
            2, found.width(7), 3, found.name))  # fmt: skip
        np.testing.assert_array_equal(by_name, wanted)
    monkeypatch.setattr(attention, "_attention", long_road)
    with pytest.raises(ValueError, match="feature_map: expected one of"):
        linear_attention(q, k, v, "no such map")
    with pytest.raises(ValueError, match="q: expected as many features"):
        linear_attention(q, k[..., :5], v, found)
