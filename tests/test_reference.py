"""The oracle: that its two forms agree, and that it does what its docstrings say.

Its values are checked against 50 digits in test_golden.py.
"""

import ast
import math
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from linattn import feature_maps, reference
from linattn.reference import MAPS, double_sum, error_bound, recurrence

U = 2.0**-53


def mixed(x: Any) -> Any:
    """A map whose features mix the numbers of a row; D = 2 d_k + 1."""
    both = np.concatenate([x, -x], axis=-1)
    return np.concatenate([np.exp(both / 4), np.tanh(x.sum(axis=-1, keepdims=True)) + 1], axis=-1)


EVERY_MAP = [*MAPS, mixed]


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).normal(size=shape)


def agree(one: Any, other: Any, bound: Any, c: float) -> None:
    assert one.shape == other.shape == bound.shape
    assert (np.abs(one - other) <= c * U * bound).all()


@pytest.mark.parametrize("feature_map", EVERY_MAP)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 37, 257])
def test_the_two_forms_agree(feature_map: Any, causal: bool, n: int) -> None:
    n_q = n if causal else 7
    heads = 2 if n < 100 else 1
    q, k, v = normal(1, 1, 2 * heads, n_q, 5), normal(2, 1, heads, n, 5), normal(3, 1, heads, n, 7)
    mask = np.random.default_rng(4).random((1, heads, n)) < 0.7
    options: dict[str, Any] = {"causal": causal, "enable_gqa": True}
    if causal:
        options["cu_seqlens"] = [0, 0, n // 9, n]
    for given in ({}, {"key_mask": mask}, {"normalize": False, "key_mask": mask[0, 0]}):
        every = {**options, **given}
        out, state = double_sum(q, k, v, feature_map, **every, return_state=True)
        walked, end = recurrence(q, k, v, feature_map, **every, return_state=True)
        bound = error_bound(q, k, v, feature_map, **every)
        agree(out, walked, bound, 16)
        assert all(a is b or (a == b).all() for a, b in zip(state, end, strict=True))
        # and again, from there
        out = double_sum(q, k, v, feature_map, **every, state=state)
        walked = recurrence(q, k, v, feature_map, **every, state=state)
        agree(out, walked, error_bound(q, k, v, feature_map, **every, state=state), 16)


@pytest.mark.parametrize("form", [double_sum, recurrence])
@pytest.mark.parametrize("feature_map", ["elu1", "exp", "identity"])
def test_a_state_stands_for_its_keys(form: Any, feature_map: str) -> None:
    q, k, v = normal(1, 3, 11, 5), normal(2, 3, 11, 5), normal(3, 3, 11, 7)
    whole, end = form(q, k, v, feature_map, causal=True, return_state=True)
    bound = error_bound(q, k, v, feature_map, causal=True)
    for cut in (0, 4, 11):
        first, state = form(
            *(x[:, :cut] for x in (q, k, v)), feature_map, causal=True, return_state=True
        )
        second, last = form(
            *(x[:, cut:] for x in (q, k, v)),
            feature_map,
            causal=True,
            state=state,
            return_state=True,
        )
        agree(np.concatenate([first, second], 1), whole, bound, 16)
        # the scale is the same, as it is that of the largest key
        assert np.allclose(last[0], end[0], rtol=0, atol=100 * U * np.abs(end[0]).max())


@pytest.mark.parametrize("form", [double_sum, recurrence])
@pytest.mark.parametrize("feature_map", ["elu1", "exp", "identity"])
def test_what_is_not_seen_does_not_count(form: Any, feature_map: str) -> None:
    q, k, v = normal(1, 300, 3), normal(2, 300, 3), normal(3, 300, 2)
    before = form(q, k, v, feature_map, causal=True)
    for bad in (math.nan, math.inf, 1000.0):
        worse_k, worse_v = k.copy(), v.copy()
        worse_k[270:], worse_v[270:] = bad, bad
        after = form(q, worse_k, worse_v, feature_map, causal=True)
        bound = error_bound(q[:270], k[:270], v[:270], feature_map, causal=True)
        agree(after[:270], before[:270], bound, 16)

        mask = np.arange(300) < 270
        masked = form(q, worse_k, worse_v, feature_map, key_mask=mask)
        assert (masked == form(q, k[:270], v[:270], feature_map)).all()
    nothing = form(q, k, v, feature_map, key_mask=np.zeros(300, bool))
    assert (nothing == 0).all()


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_meet_without_a_seam(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths around the block edge, against rows written out."""
    monkeypatch.setattr(reference, "BLOCK", 256)
    for n in (255, 256, 257, 513):
        q, k, v = normal(1, n, 3), normal(2, n, 3), normal(3, n, 2)
        k[::50] *= 200  # powers that share no scale
        out = double_sum(q, k, v, "exp", causal=causal)
        bound = error_bound(q, k, v, "exp", causal=causal)
        for i in (0, 1, 254, 255, 256, n - 1):
            if i < n:
                seen = slice(0, i + 1 if causal else n)
                terms = q[i] + k[seen]
                weights = np.exp(terms - terms.max()).sum(axis=-1)
                row = weights @ v[seen] / weights.sum()
                agree(out[i], row, bound[i], 16)


def test_batch_axes_broadcast_and_each_element_stands_alone() -> None:
    q, k, v = normal(1, 2, 1, 5, 3), normal(2, 7, 11, 3), normal(3, 2, 1, 11, 13)
    out, (kv, k_sum, _) = double_sum(q, k, v, return_state=True)
    assert out.shape == (2, 7, 5, 13)
    assert kv.shape == (2, 7, 3, 13)
    assert k_sum.shape == (2, 7, 3)
    for i, j in np.ndindex(2, 7):
        assert (out[i, j] == double_sum(q[i, 0], k[j], v[i, 0])).all()


def test_grouped_heads_are_repeated_heads() -> None:
    q, k, v = normal(1, 2, 6, 5, 3), normal(2, 2, 2, 7, 3), normal(3, 2, 2, 7, 11)
    mask = np.random.default_rng(4).random((2, 2, 7)) < 0.7
    out = double_sum(q, k, v, key_mask=mask, enable_gqa=True)
    k, v, mask = (np.repeat(x, 3, axis=1) for x in (k, v, mask))
    assert (out == double_sum(q, k, v, key_mask=mask)).all()


def test_the_exponential_is_exact_far_out() -> None:
    x = np.array([0.0, -0.0, 1.0, -1.0, 700.0, -700.0, 88.8, 1e-9, 0.34657359027997264])
    f, n = reference._exp_parts(x)
    exact = [math.exp(value) for value in x]
    assert np.abs(np.ldexp(f, n.astype(int)) / exact - 1).max() < 4 * U
    with np.errstate(over="ignore"):
        f, n = reference._exp_parts(np.array([-math.inf, math.inf, math.nan, 1e300]))
    assert f[0] == 0
    assert f[1] == math.inf
    assert math.isnan(f[2])
    k = np.array([[1000.0], [999.0]])
    weights = np.array([1.0, math.exp(-1.0)]) / (1 + math.exp(-1.0))
    out = double_sum([[-1000.0]], k, np.eye(2), "exp")
    assert np.abs(out / weights - 1).max() < 4 * U
    # a scalar scale would lose one of these features
    k = np.array([[100.0, -100.0], [99.0, -99.0]])
    out = double_sum([[-100.0, 100.0]], k, [[1.0], [3.0]], "exp")
    e = math.e
    assert abs(out[0, 0] - (1 + 3 / e + 1 + 3 * e) / (1 + 1 / e + 1 + e)) < 1e-14
    walked = recurrence([[-100.0, 100.0]], k, [[1.0], [3.0]], "exp")
    assert np.abs(walked / out - 1).max() < 4 * U


@pytest.mark.parametrize("form", [double_sum, recurrence])
def test_its_own_error_does_not_grow_with_the_length(form: Any) -> None:
    """Against a correctly rounded sum; the recurrence only where long double is longer."""
    if form is recurrence and np.finfo(np.longdouble).nmant <= 52:
        pytest.skip("long double is float64 here")
    for n in (101, 20_011):
        k, v = normal(2, n, 1), np.abs(normal(3, n, 1))
        weight = np.maximum(k[:, 0], 0)
        exact = math.fsum((weight * v[:, 0]).tolist()) / math.fsum(weight.tolist())
        assert abs(form([[1.0]], k, v, "relu", eps=0.0)[0, 0] / exact - 1) < 16 * U


@pytest.mark.parametrize(
    "dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.dtype(">f4")]
)
def test_every_dtype_is_converted_exactly(dtype: Any) -> None:
    q, k, v = (normal(i, 5, 3).astype(dtype) for i in range(3))
    out = double_sum(q, k, v)
    assert out.dtype == np.float64
    assert (out == double_sum(*(x.astype(np.float64) for x in (q, k, v)))).all()


def test_our_own_maps_are_understood() -> None:
    q, k, v = (normal(i, 5, 3) for i in range(3))
    for name in MAPS:
        known = feature_maps.get(name)
        assert (double_sum(q, k, v, known) == double_sum(q, k, v, name)).all()
        assert reference.default_eps(known) == reference.default_eps(name) == known.eps
        assert np.allclose(known(q), MAPS[name](q), rtol=1e-15, atol=0)
    # rows first, then exp number by number, without overflow
    w = normal(4, 3, 7)
    far = feature_maps.FeatureMap("far", "exp", lambda x: 1000 * (x @ w), eps=0.0)
    assert (double_sum(q, k, v, far) == double_sum(1000 * (q @ w), 1000 * (k @ w), v, "exp")).all()
    assert np.isfinite(error_bound(q, k, v, far)).all()


@pytest.mark.parametrize("name", list(MAPS))
def test_conditioning_is_the_derivative(name: str) -> None:
    """The bound of a known map is that of the same map passed as a callable."""
    q, k, v = normal(1, 5, 3), normal(2, 7, 3), normal(3, 7, 2)
    for options in ({}, {"normalize": False}, {"key_mask": np.arange(7) < 4}):
        known = error_bound(q, k, v, name, 0.25, **options)  # type: ignore[arg-type]
        found = error_bound(q, k, v, lambda x: MAPS[name](x), 0.25, **options)  # type: ignore[arg-type]
        assert np.allclose(known, found, rtol=1e-6)


def test_the_bound_covers_a_rounding_of_the_inputs() -> None:
    """What a relative change of every input by at most delta does to the output."""
    delta = 2.0**-20
    rng = np.random.default_rng(5)
    for feature_map in EVERY_MAP:
        for causal in (False, True):
            q, k, v = normal(1, 2, 11, 3) * 3, normal(2, 2, 11, 3) * 3, normal(3, 2, 11, 5)
            out = double_sum(q, k, v, feature_map, causal=causal)
            bound = error_bound(q, k, v, feature_map, causal=causal)
            for _ in range(5):
                moved = (x * (1 + delta * rng.choice([-1.0, 1.0], x.shape)) for x in (q, k, v))
                change = np.abs(double_sum(*moved, feature_map, causal=causal) - out)
                assert (change <= 1.05 * delta * bound).all()


def test_the_bound_does_not_grow_with_the_length() -> None:
    for n in (100, 10_000):
        bound = error_bound(np.ones((1, 1)), np.ones((n, 1)), np.ones((n, 1)), "relu")
        assert abs(bound[0, 0] - 8) < 1e-4


def test_inputs_keep_their_bits() -> None:
    q, k, v = normal(1, 5, 3), normal(2, 5, 3), normal(3, 5, 2)
    state = double_sum(q, k, v, return_state=True)[1]
    arrays = [q, k, v, state[0], state[1]]
    before = [x.copy() for x in arrays]
    for x in arrays:
        x.flags.writeable = False
    for form in (double_sum, recurrence):
        form(q, k, v, causal=True, state=state, return_state=True)
    error_bound(q, k, v, state=state)
    assert all((a == b).all() for a, b in zip(arrays, before, strict=True))


def test_errors() -> None:
    x = np.ones((3, 2))
    with pytest.raises(ValueError, match=r"elu1.*relu.*gelu"):
        double_sum(x, x, x, "gelu")
    with pytest.raises(ValueError, match="causal"):
        double_sum(x[:2], x, x, causal=True)
    with pytest.raises(ValueError, match="key_mask"):
        double_sum(x, x[None, None], x, key_mask=np.ones((1, 3), bool))


def test_it_imports_numpy_alone() -> None:
    assert reference.__file__
    tree = ast.parse(Path(reference.__file__).read_text("utf-8"))
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names.add(node.module or "")
    outside = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert outside == {"numpy"}
