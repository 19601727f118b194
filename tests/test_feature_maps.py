"""Each map against its definition, at the places where it is usually got wrong."""

import math
import pickle

import ml_dtypes
import mpmath
import numpy as np
import pytest

from linattn import FeatureMap, feature_maps

EXACT = {
    "elu1": lambda x: x + 1 if x >= 0 else mpmath.exp(x),
    "relu": lambda x: max(x, 0),
    "squared_relu": lambda x: max(x, 0) ** 2,
    "exp": mpmath.exp,
    "softplus": lambda x: mpmath.log1p(mpmath.exp(x)),
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
    "identity": lambda x: x,
}
EPSILON = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def test_the_list_is_whole():
    assert feature_maps.names() == list(EXACT) == list(feature_maps.KERNELS)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("name", EXACT)
def test_definition(name, dtype):
    points = np.array([-80, -30, -16, -6, -1, -0.5, -1e-3, 0, 1e-3, 0.5, 1, 6, 11], dtype)
    got = feature_maps.get(name)(points)
    assert got.dtype == dtype
    epsilon = EPSILON[np.dtype(dtype).name]
    tiny = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    with mpmath.workdps(50):
        for x, y in zip(points.astype(float), got.astype(float), strict=True):
            exact = EXACT[name](mpmath.mpf(x))
            assert abs(y - exact) <= 2 * epsilon * abs(exact) + tiny, (x, y, exact)


def test_elu1_keeps_the_digits_of_small_features():
    assert feature_maps.elu1(np.float32([-16.0]))[0] == np.exp(np.float32(-16))
    six = feature_maps.elu1(np.array([-6], ml_dtypes.bfloat16))
    assert six[0] == ml_dtypes.bfloat16(math.exp(-6))
    assert feature_maps.elu1(np.zeros(1))[0] == 1.0


@pytest.mark.parametrize("name", EXACT)
def test_far_out(name, recwarn):
    x = np.array([-np.inf, -1e300, np.nan])
    got = feature_maps.get(name)(x)
    assert np.isnan(got[2])
    if feature_maps.get(name).nonnegative:
        assert (got[:2] == 0).all()
    assert not recwarn.list


@pytest.mark.parametrize("name", EXACT)
def test_what_a_map_says_of_itself(name):
    found = feature_maps.get(name)
    assert found is getattr(feature_maps, name)
    assert found.name == found.kernel == name
    assert found.width(17) == 17
    assert found.exponential == (name == "exp")
    assert found.eps == (0.0 if name == "exp" else 1e-6)
    x = np.linspace(-5, 5, 31)
    assert found.nonnegative == bool((found(x) >= 0).all())
    assert repr(found) == f"<feature map {name}>"
    assert pickle.loads(pickle.dumps(found)) is found


def test_get():
    def double(x):
        return 2 * x

    assert feature_maps.get() is feature_maps.get(None) is feature_maps.elu1
    assert feature_maps.get("relu") is feature_maps.relu
    assert feature_maps.get(feature_maps.exp) is feature_maps.exp
    found = feature_maps.get(double)
    assert found == feature_maps.get(double)
    assert found != feature_maps.get(lambda x: 2 * x)
    assert "double" in found.name
    assert (found.kernel, found.nonnegative, found.width(3)) == ("identity", False, None)
    assert found(np.float32([[3]])).tolist() == [[6]]


@pytest.mark.parametrize(
    ("value", "kind", "parts"),
    [
        ("elu", ValueError, ["feature_map", "'elu1'", "got 'elu'"]),
        (3, TypeError, ["feature_map", "a callable", "got int"]),
        (
            "favor(feat=3)", ValueError,
            ["feature_map: expected parameters of favor among features, seed,", "got 'feat' in ",
             "'favor(feat=3)'; rename it"],
        ),
        (
            "favor(3, features=4)", ValueError,
            ["feature_map: expected each parameter of favor once", "'features' twice", "leave one"],
        ),
        (
            "dpfp(2, 3)", ValueError,
            ["feature_map: expected at most 1 values for dpfp, got 2", "parameters are nu"],
        ),
        (
            "dpfp(nu=x)", ValueError,
            ["feature_map: expected dpfp(parameter=value, ...)", "literal", "got 'dpfp(nu=x)'",
             "the parameters are nu"],
        ),
        (
            "rfa(sigma='a')", ValueError,
            ["feature_map: expected values that rfa takes", "got \"rfa(sigma='a')\""],
        ),
        (
            "favor(features=0)", ValueError,
            ["feature_map: expected values that favor takes", "got 'favor(features=0)'",
             "features: expected an integer >= 1, got 0"],
        ),
        *(
            (
                name, ValueError,
                ["feature_map: expected hedgehog as a FeatureMap", "weights are arrays",
                 f"got the name {name!r}", "pass linattn.feature_maps.hedgehog(weight)"],
            )
            for name in ("hedgehog", "hedgehog(3)")
        ),
    ],
)  # fmt: skip
def test_get_refuses(value, kind, parts):
    with pytest.raises(kind) as error:
        feature_maps.get(value)
    for part in parts:
        assert part in str(error.value)


def test_a_map_of_ones_own():
    W = np.random.default_rng(0).standard_normal((3, 7))
    made = FeatureMap("random exponentials", "exp", lambda x: x @ W, eps=0.0)
    x = np.random.default_rng(1).standard_normal((5, 3))
    assert made.exponential
    np.testing.assert_allclose(made(x), np.exp(x @ W), rtol=1e-15)
    with pytest.raises(ValueError, match="kernel: expected one of .*'exp'.* got 'tanh'"):
        FeatureMap("no", "tanh")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("elu1", 0),
        ("exp", 0),
        ("softmax", 0),  # inside the core, without a product
        ("dpfp(nu=3)", 0),
        ("cosformer", 0),
        ("favor(features=128)", 2 * 64 * 128),  # inside the core
        ("rfa(features=128)", 2 * 64 * 64),
        ("performer_relu(features=128)", 2 * 64 * 128),
        ("favor(features=128, kind='hyperbolic')", 2 * 64 * 64),
        ("favor(features=128, kind='trigonometric')", 2 * 64 * 64 + 24 * 128),
        ("relu_random(features=128)", 2 * 64 * 128),
        ("taylor", 24 * (1 + 64 + 2 * 2080)),  # a packed square counts twice
        ("taylor(order=3)", 24 * (1 + 64 + 2 * 2080 + 45760)),
        ("taylor(packed=False)", 24 * 4161),
        ("polynomial(degree=3)", 24 * (64 + 2 * 2080 + 45760)),
        ("polynomial_sketch(features=128, degree=1)", 2 * 64 * 128),
        ("polynomial_sketch(features=128)", 2 * 2 * 64 * 128),
        ("polynomial_sketch(features=128, squared=True)", 2 * 64 * 128),
    ],
)
def test_operations_of_making_a_row(name: str, expected: int) -> None:
    assert feature_maps.get(name).row_operations(64) == expected


def test_operations_of_making_a_row_with_weights() -> None:
    weight = np.ones((7, 64))
    assert feature_maps.t2r(weight).row_operations(64) == 2 * 64 * 7
    assert feature_maps.hedgehog(weight).row_operations(64) == 2 * 64 * 7
    joint = feature_maps.hedgehog(weight, normalise="joint")
    assert joint.row_operations(64) == 2 * 64 * 7
    assert feature_maps.get(lambda x: x * x).row_operations(64) == 0  # nobody knows
