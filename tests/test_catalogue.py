"""Every map of the catalogue: what it says of itself, its kernel, and the laws.

A family is tested by being there: `feature_maps.catalogue` lists it. What needs parameters, or is
worth testing with several, is in `VARIANTS`; the kernel at 50 digits is in `KERNELS`.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import pickle
from pathlib import Path
from typing import Any

import cases
import mpmath
import numpy as np
import pytest
from cases import DTYPES, definition, inputs, normal, same_bits

from linattn import State, feature_maps, linear_attention, reference, softmax_attention
from linattn.feature_maps import Family, FeatureMap

Array = Any

ROOT = Path(__file__).parents[1]
D_K = 5
N = 71  # more than a chunk

rng = np.random.default_rng(0)
W, B = rng.standard_normal((7, D_K)) / 2, rng.standard_normal(7) / 2

# Parameters beside those a family has by itself.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "softmax": [{}],
    "favor": [{"features": 24}, {"features": 24, "kind": "hyperbolic", "scale": 0.5},
              {"features": 7, "orthogonal": False, "seed": 3},
              {"features": 32, "kind": "trigonometric"}],
    "rfa": [{"features": 64}, {"features": 32, "sigma": 2.0}],
    "relu_random": [{"features": 24}],
    "performer_relu": [{"features": 24}, {"features": 3, "offset": 0.1}],
    "dpfp": [{}, {"nu": 3}],
    "taylor": [{}, {"packed": False}, {"order": 3, "scale": 0.4}, {"order": 4, "packed": False}],
    "polynomial": [{}, {"degree": 4, "packed": False}, {"degree": 3, "offset": 2.0}],
    "polynomial_sketch": [{"features": 16, "degree": 3}, {"features": 6, "squared": True},
                          {"features": 5, "squared": True, "degree": 4, "offset": 1.0}],
    "cosformer": [{"length": N}, {}],
    "hedgehog": [{"weight": W, "bias": B}, {"weight": W, "normalise": "halves"},
                 {"weight": W, "bias": B, "normalise": "joint"}],
    "t2r": [{"weight": W, "bias": B + 1}],
    "performer_learned": [{"weight": W}, {"weight": W, "bias": B, "scale": 1.0}],
}  # fmt: skip

FAMILIES = {name: kind for name, kind in feature_maps.catalogue().items() if isinstance(kind, type)}
MAPS: dict[str, FeatureMap] = {}
for _name, _kind in FAMILIES.items():
    for _given in VARIANTS.get(_name, [{}]):
        _made = _kind(**_given)
        MAPS[_made.name] = _made

every_map = pytest.mark.parametrize("name", list(MAPS))
every_dtype = pytest.mark.parametrize("dtype", list(DTYPES))

C = 8.0
"""Law 1's constant here: maps of several steps round several times. At most 4 is seen."""


@pytest.fixture(params=["as for users", "array"])
def road(request: pytest.FixtureRequest) -> Any:
    """The compiled core with the array backend behind it, and the array backend alone."""
    with cases.using("array" if request.param == "array" else None):
        yield request.param


def placed(found: FeatureMap, rows: slice = slice(0, N)) -> FeatureMap:
    """The map for rows that stand there, where it wants to know."""
    if getattr(found, "positional", False):
        return found.at(range(rows.start, rows.stop))  # type: ignore[attr-defined]
    return found


def close(out: Array, expected: Array, bound: Array, what: Any = "") -> None:
    cases.close(out, expected, bound, C, what)


def steps(state: State, q: Array, k: Array, v: Array, start: int, **options: Any) -> Array:
    rows = []
    for i in range(k.shape[-2]):
        at = slice(i, i + 1)
        here = state
        if getattr(state.feature_map, "positional", False):
            here = state.at([start + i])
        rows.append(here.step(q[..., at, :], k[..., at, :], v[..., at, :], **options))
    return np.concatenate(rows, axis=-2)


# ------------------------------------------------------------------------- what it says of itself


def test_every_family_is_whole() -> None:
    for name, kind in FAMILIES.items():
        assert getattr(feature_maps, name) is kind
        assert kind.label == name
        assert kind.paper.startswith("arXiv ")
        assert kind.computes or kind.approximates
        assert kind.__doc__
        assert "Source: " in kind.__doc__
        assert ">>> " in kind.__doc__
        pages = [p.read_text("utf-8") for p in (ROOT / "docs" / "maps").glob("*.md")]
        assert any(f"`{name}" in page for page in pages), f"no page in docs/maps about {name}"


@every_map
def test_what_a_map_says_of_itself(name: str) -> None:
    found = MAPS[name]
    x = np.random.default_rng(1).standard_normal((N, D_K)) * 2
    phi = placed(found)(x)
    assert phi.shape == (N, found.width(D_K))
    assert phi.dtype == x.dtype
    assert found.nonnegative <= bool((phi >= 0).all())
    assert found.averages <= bool((phi @ phi.T >= -1e-12).all())
    assert found.averages >= found.nonnegative
    assert found.eps == (0.0 if found.exponential else 1e-6)
    assert repr(found) == f"<feature map {name}>"
    again = pickle.loads(pickle.dumps(found))
    assert again == found
    assert hash(again) == hash(found)
    same_bits(placed(again)(x), phi)  # drawn once and for all
    assert found != feature_maps.relu
    assert isinstance(found, Family)
    if not found.learned:
        assert feature_maps.get(name) == found


@every_map
def test_half_precision_is_widened(name: str) -> None:
    found = placed(MAPS[name])
    if found.project is None:
        return
    for dtype in DTYPES.values():
        x = normal(1, N, D_K, dtype=dtype)
        wanted = np.float64 if dtype == np.float64 else np.float32
        assert found.project(x).dtype == wanted


def test_names_are_read() -> None:
    get = feature_maps.get
    assert get("favor(64, seed=3, kind='hyperbolic')") == feature_maps.favor(
        64, seed=3, kind="hyperbolic"
    )
    assert get("taylor") == feature_maps.taylor() == get(feature_maps.taylor)
    assert get(" dpfp( nu = 2 ) ").name == "dpfp(nu=2)"
    for name, parts in {
        "favour": ["'favor'", "got 'favour'"],
        "favor(features=-1)": ["features: expected an integer >= 1, got -1"],
        "favor(width=3)": ["favor among features, seed, orthogonal", "got 'width'", "rename"],
        "favor(seed=open)": ["favor(parameter=value, ...)", "each value a literal"],
        "favor(": ["got 'favor('"],
        "dpfp(1) + 2": ["got 'dpfp(1) + 2'"],
    }.items():
        with pytest.raises(ValueError, match="feature_map: expected") as error:
            get(name)
        for part in parts:
            assert part in str(error.value)


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: feature_maps.favor(0), ["features: expected an integer >= 1, got 0"]),
        (lambda: feature_maps.favor(kind="sin"), ["kind: expected", "'hyperbolic'", "'sin'"]),
        (lambda: feature_maps.favor(7, kind="hyperbolic"), ["features: expected an even", "7"]),
        (lambda: feature_maps.rfa(sigma=0.0), ["sigma: expected a number > 0, got 0.0"]),
        (lambda: feature_maps.dpfp(0), ["nu: expected an integer >= 1, got 0"]),
        (lambda: feature_maps.taylor(order=1.5), ["order: expected an integer", "1.5"]),
        (lambda: feature_maps.polynomial(offset=-1.0), ["offset: expected a number >= 0"]),
        (lambda: feature_maps.polynomial_sketch(degree=3, squared=True), ["degree", "even", "3"]),
        (lambda: feature_maps.hedgehog(), ["weight: expected an array", "NoneType"]),
        (lambda: feature_maps.hedgehog(W, W), ["bias: expected shape (7,)", "(7, 5)"]),
        (lambda: feature_maps.hedgehog(W, query_weight=W[1:]),
         ["query_weight: expected (7, 5)", "got (6, 5)"]),
        (lambda: feature_maps.hedgehog(W, query_weight=W, query_bias=W),
         ["query_bias: expected shape (7,)", "as query_weight has rows"]),
        (lambda: feature_maps.t2r(W, query_bias=B), ["query_bias", "pass that too"]),
        (lambda: feature_maps.hedgehog(W, normalise="x"), ["normalise", "'halves'", "'x'"]),
        (lambda: feature_maps.t2r(W)(np.ones((2, 3))), ["weight: expected 3 columns", "(7, 5)"]),
        (lambda: feature_maps.cosformer()(np.ones((2, 3))), ["positions", "feature_map.at("]),
        (lambda: feature_maps.cosformer().at(range(3))(np.ones((2, 3))),
         ["positions: expected one for each of 2 rows, got shape (3,)"]),
        (lambda: feature_maps.cosformer(5).at([4, 6])(np.ones((2, 3))), ["0 to length = 5"]),
        (lambda: State.zeros((), 3, 3).at([0]), ["positions", "'elu1'", ".at("]),
    ],
)  # fmt: skip
def test_errors(make: Any, parts: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        make()
    for part in parts:
        assert part in str(error.value)


# ----------------------------------------------------------------- the kernel that it says it has

mp = mpmath.mp


def dot(a: Any, b: Any) -> Any:
    return mpmath.fsum(x * y for x, y in zip(a, b, strict=True))


def relu(x: Any) -> Any:
    return [max(a, mpmath.mpf(0)) for a in x]


def soft(x: Any) -> Any:
    weights = [mpmath.exp(a) for a in x]
    return [w / mpmath.fsum(weights) for w in weights]


def mirrored(x: Any) -> Any:
    return relu(x) + relu([-a for a in x])


def layer(found: Any, x: Any, scale: Any = 1) -> Any:
    bias = np.zeros(len(found.weight)) if found.bias is None else found.bias
    rows = found.weight.tolist()
    return [
        dot(row, [scale * a for a in x]) + b for row, b in zip(rows, bias.tolist(), strict=True)
    ]


def rows_scale(found: Any) -> Any:
    return mpmath.mpf(D_K) ** -0.25 if found.scale is None else mpmath.mpf(found.scale)


def t_of(found: Any, q: Any, k: Any) -> Any:
    return rows_scale(found) ** 2 * dot(q, k)


def dpfp(found: Any, x: Any) -> Any:
    r = mirrored(x)
    return [r[i] * r[i - j] for j in range(1, found.nu + 1) for i in range(len(r))]


def hedgehog(found: Any, x: Any) -> Any:
    z = layer(found, x)
    minus = [-a for a in z]
    if found.normalise == "halves":
        return soft(z) + soft(minus)
    return soft(z + minus) if found.normalise else [mpmath.exp(a) for a in z + minus]


def learned_favor(found: Any, x: Any) -> Any:
    s = rows_scale(found)
    half = s * s * dot(x, x) / 2
    z = layer(found, x, s)
    return [mpmath.exp(a - half) / mpmath.sqrt(len(z)) for a in z]


# phi(q) . phi(k) at rows i and j, from the definition alone
KERNELS: dict[str, Any] = {
    "softmax": lambda f, q, k, i, j: dot(soft(q), soft(k)),
    "dpfp": lambda f, q, k, i, j: dot(dpfp(f, q), dpfp(f, k)),
    "taylor": lambda f, q, k, i, j: mpmath.fsum(
        t_of(f, q, k) ** p / mpmath.factorial(p) for p in range(f.order + 1)
    ),
    "polynomial": lambda f, q, k, i, j: (t_of(f, q, k) + f.offset) ** f.degree,
    "cosformer": lambda f, q, k, i, j: (
        dot(relu(q), relu(k)) * mpmath.cos(mpmath.pi * (i - j) / (2 * f.length))
    ),
    "hedgehog": lambda f, q, k, i, j: dot(hedgehog(f, q), hedgehog(f, k)),
    "t2r": lambda f, q, k, i, j: dot(relu(layer(f, q)), relu(layer(f, k))),
    "performer_learned": lambda f, q, k, i, j: dot(learned_favor(f, q), learned_favor(f, k)),
}


def angle(q: Any, k: Any) -> Any:
    return mpmath.acos(dot(q, k) / mpmath.sqrt(dot(q, q) * dot(k, k)))


def arc_cosine(q: Any, k: Any) -> Any:
    a = angle(q, k)
    size = mpmath.sqrt(dot(q, q) * dot(k, k))
    return size * (mpmath.sin(a) + (mpmath.pi - a) * mpmath.cos(a)) / (2 * mpmath.pi)


def lifted(f: Any, q: Any, k: Any) -> Any:
    lengths = mpmath.sqrt(dot(q, q)) + mpmath.sqrt(dot(k, k))
    side = f.offset * lengths / mpmath.sqrt(2 * mpmath.pi)
    return f.features * (arc_cosine(q, k) + side + f.offset**2)


# what the mean over draws of phi(q) . phi(k) is
LIMITS: dict[str, Any] = {
    "favor": lambda f, q, k: mpmath.exp(t_of(f, q, k)),
    "rfa": lambda f, q, k: mpmath.exp((mpmath.cos(angle(q, k)) - 1) / mpmath.mpf(f.sigma) ** 2),
    "relu_random": lambda f, q, k: arc_cosine(q, k),
    "performer_relu": lifted,
    "polynomial_sketch": lambda f, q, k: (t_of(f, q, k) + f.offset) ** f.degree,
}


def test_every_kernel_is_checked() -> None:
    """By `KERNELS` if it is exact, by `LIMITS` if it is an estimate."""
    for name, kind in FAMILIES.items():
        assert (name in LIMITS) == bool(kind.approximates)
        assert kind.approximates or name in KERNELS


@pytest.mark.parametrize("name", [n for n in MAPS if not MAPS[n].approximates])  # type: ignore[attr-defined]
def test_kernel(name: str) -> None:
    found = MAPS[name]
    q, k = normal(1, N, D_K), normal(2, N, D_K)
    got = placed(found)(q) @ placed(found)(k).T
    with mp.workdps(50):
        for i, j in ((0, 0), (3, 1), (2, 60), (70, 0), (11, 12)):
            exact = KERNELS[found.label](found, q[i].tolist(), k[j].tolist(), i, j)  # type: ignore[attr-defined]
            assert abs(got[i, j] - exact) <= 1e-13 * max(1, abs(exact)), (i, j)


@pytest.mark.parametrize("name", [n for n in MAPS if MAPS[n].approximates])  # type: ignore[attr-defined]
def test_estimate_is_unbiased(name: str) -> None:
    """The mean over 2,000 draws, within 4.5 of its standard errors: one false alarm in 100,000."""
    found: Any = MAPS[name]
    q, k = normal(1, 3, D_K) / 2, normal(2, 3, D_K) / 2
    draws = []
    for seed in range(2000):
        drawn = found.redraw(seed)
        draws.append((drawn(q) * drawn(k)).sum(-1))
    mean, error = np.mean(draws, 0), np.std(draws, 0) / math.sqrt(len(draws))
    for i in range(3):
        exact = float(LIMITS[found.label](found, q[i].tolist(), k[i].tolist()))
        if getattr(found, "squared", False):  # the square of an estimate: above by its variance
            assert mean[i] >= exact - 4.5 * error[i]
            continue
        assert abs(mean[i] - exact) <= 4.5 * error[i], (mean[i], exact, error[i])


@pytest.mark.parametrize("name", [n for n in MAPS if MAPS[n].closed_form])
def test_closed_form(name: str) -> None:
    found = MAPS[name]
    q, k = normal(1, N, D_K), normal(2, N, D_K)
    t = found.prepare(q) @ found.prepare(k).T
    np.testing.assert_allclose(found.kappa(t), found(q) @ found(k).T, rtol=1e-11, atol=1e-11)
    assert found.prepare(q.astype(np.float16)).dtype == np.float32


# ------------------------------------------------------------------------------------- estimates


def favor_error(features: int, kind: str, seeds: range) -> Array:
    """Of the normalised output against exact softmax attention, relative, for each seed."""
    q, k, v = (
        x / 4 for x in inputs(5, (), 64, 16, 8, np.float64)
    )  # where 1/m is the term that counts
    exact = softmax_attention(q, k, v)
    errors = []
    for seed in seeds:
        out = linear_attention(q, k, v, feature_maps.favor(features, seed, kind=kind))
        errors.append(np.linalg.norm(out - exact) / np.linalg.norm(exact))
    return np.array(errors)


@pytest.mark.parametrize("kind", ["positive", "hyperbolic"])
def test_the_error_of_favor_falls_as_one_over_the_root_of_features(kind: str) -> None:
    """The slope of log error over log features is -1/2, at 99.9 % confidence.

    Of the mean over 64 draws at each of six widths; the interval is that of least squares whose
    residuals are the standard errors of the means.
    """
    widths = np.array([64, 128, 256, 512, 1024, 2048])
    errors = np.array([favor_error(int(m), kind, range(64)) for m in widths])
    y = np.log(errors.mean(1))
    spread = errors.std(1, ddof=1) / errors.mean(1) / math.sqrt(errors.shape[1])
    x = np.log(widths) - np.log(widths).mean()
    slope = float(x @ y / (x @ x))
    error = float(np.sqrt((x**2 * spread**2).sum()) / (x @ x))
    assert abs(slope + 0.5) <= 3.29 * error + 0.01, (slope, error)  # 0.01: the next order in 1/m
    assert error < 0.02


def test_orthogonal_directions_vary_less() -> None:
    q, k = normal(1, 40, 16) / 2, normal(2, 40, 16) / 2

    def spread(orthogonal: bool) -> float:
        errors = []
        for seed in range(300):
            favor = feature_maps.favor(16, seed, orthogonal)
            errors.append((favor(q) * favor(k)).sum(-1) - np.exp((q * k).sum(-1) / 4))
        return float(np.mean(np.square(errors)))

    assert spread(True) < 0.9 * spread(False)


def test_directions_are_at_right_angles() -> None:
    from linattn.feature_maps._random import directions

    w = directions(1, 13, 5, True)
    for block in (w[:5], w[5:10], w[10:]):
        angles = block @ block.T
        np.testing.assert_allclose(angles, np.diag(np.diag(angles)), atol=1e-12)
    lengths = np.concatenate(
        [np.linalg.norm(directions(s, 5, 5, True), axis=1) for s in range(400)]
    )
    assert abs((lengths**2).mean() - 5) < 4 * math.sqrt(2 * 5 / lengths.size)  # chi squared of 5


def test_two_calls_give_the_same_bits_and_redraw_other_ones() -> None:
    q, k, v = inputs(1, (), N, D_K, 3, np.float32)
    favor = feature_maps.favor(16, seed=4)
    out = linear_attention(q, k, v, favor)
    same_bits(out, linear_attention(q, k, v, favor))
    same_bits(out, linear_attention(q, k, v, feature_maps.favor(16, seed=4)))
    other = linear_attention(q, k, v, favor.redraw(5))
    assert not np.array_equal(out, other)
    with pytest.raises(ValueError, match="expected a state of feature map 'favor"):
        State.of(k, v, favor) + State.of(k, v, favor.redraw(5))


# ------------------------------------------------------------------------------------------- laws


@functools.lru_cache(maxsize=256)
def given(name: str, dtype: str, causal: bool) -> Any:
    kind = DTYPES[dtype]
    q, k, v = inputs(3, (2,), N, D_K, 7, kind)
    return q, k, v, *definition(q, k, v, placed(MAPS[name]), causal=causal)


@every_dtype
@every_map
def test_definition(road: str, dtype: str, name: str) -> None:
    """Laws 1 and 2: the definition, in both orders and through a state."""
    q, k, v, expected, bound = given(name, dtype, False)
    found = placed(MAPS[name])
    for order in ("linear", "quadratic", "auto"):
        out = linear_attention(q, k, v, found, order=order)  # type: ignore[arg-type]
        assert out.dtype == DTYPES[dtype]
        close(out, expected, bound, order)
    close(State.of(k, v, found).query(q), expected, bound, "state")


@every_dtype
@every_map
def test_definition_causal(road: str, dtype: str, name: str) -> None:
    """Law 1, causal and one by one; law 5, in parts and through a file."""
    q, k, v, expected, bound = given(name, dtype, True)
    found, kind = MAPS[name], DTYPES[dtype]
    out = linear_attention(q, k, v, placed(found), causal=True)
    assert out.dtype == kind
    close(out, expected, bound)
    state = State.zeros((2,), found.width(D_K), 7, found, kind)  # type: ignore[arg-type]
    close(steps(state, q, k, v, 0), expected, bound, "steps")


@every_map
def test_continuation(road: str, name: str, tmp_path: Path) -> None:
    q, k, v, expected, bound = given(name, "float32", True)
    found: Any = MAPS[name]
    state, rows = None, []
    for at in (slice(0, 37), slice(37, 37), slice(37, 42), slice(42, 68)):
        out, state = linear_attention(
            q[:, at], k[:, at], v[:, at], placed(found, at),
            causal=True, state=state, return_state=True,
        )  # fmt: skip
        rows.append(out)
        state.save(tmp_path / "state")
        state = State.load(tmp_path / "state", found if found.learned else None)
        assert state.feature_map == found
    at = slice(68, N)
    rows.append(steps(state, q[:, at], k[:, at], v[:, at], 68))
    close(np.concatenate(rows, axis=-2), expected, bound)


@every_map
def test_monoid(road: str, name: str) -> None:
    q, k, v, expected, bound = given(name, "float32", False)
    found = MAPS[name]
    parts = [slice(0, 1), slice(1, 40), slice(40, 40), slice(40, N)]
    states = [State.of(k[:, p], v[:, p], placed(found, p)) for p in parts]
    nothing = State.zeros((2,), found.width(D_K), 7, found)  # type: ignore[arg-type]
    cases.same_states(states[1] + nothing, states[1])
    cases.same_states(states[0] + states[3], states[3] + states[0])
    left = ((states[0] + states[1]) + states[2]) + states[3]
    right = states[0] + (states[1] + (states[2] + states[3]))
    for state in (left, right):
        at = state.at(range(N)) if getattr(found, "positional", False) else state
        close(at.query(q), expected, bound)


@every_map
def test_prefix(road: str, name: str) -> None:
    """Law 4: scaled keys, NaN and infinity keep the bits before them, whatever shares the chunk."""
    found = placed(MAPS[name])
    q, k, v = inputs(4, (2,), N, D_K, 7, np.float32)
    out = linear_attention(q, k, v, found, causal=True)
    for t, bad in itertools.product((0, 5, 63, 64, 69), (np.nan, np.inf, -np.inf, 20.0)):
        spoilt = [x.copy() for x in (q, k, v)]
        for x in spoilt:
            if bad == 20.0:
                x[:, t + 1 :] *= 20
            else:
                x[:, t + 1 :: 2] = bad
        for which in ((1,), (2,), (0, 1, 2)):
            changed = [spoilt[i] if i in which else (q, k, v)[i] for i in range(3)]
            with np.errstate(all="ignore"):
                again = linear_attention(*changed, found, causal=True)
            same_bits(out[:, : t + 1], again[:, : t + 1], (t, bad, which))


@every_map
def test_mask_batch_and_permutation(road: str, name: str) -> None:
    """Laws 6, 8 and 9: masked keys as if removed, NaN too; grouped heads as repeated ones."""
    found = MAPS[name]
    q, k, v = normal(1, 4, N, D_K), normal(2, 2, N, D_K), normal(3, 2, N, 7)
    mask = np.random.default_rng(4).random((2, N)) < 0.6
    mask[1] = False
    options: dict[str, Any] = {"key_mask": mask, "enable_gqa": True}
    expected, bound = definition(q, k, v, placed(found), **options)
    k[~mask], v[~mask] = np.nan, np.nan
    with np.errstate(all="ignore"):
        for order in ("linear", "quadratic"):
            out = linear_attention(q, k, v, placed(found), order=order, **options)  # type: ignore[arg-type]
            close(out, expected, bound, order)
            assert (out[2:] == 0).all()
        causal = linear_attention(q, k, v, placed(found), causal=True, **options)
    k[~mask], v[~mask] = 0.0, 0.0
    close(causal, *definition(q, k, v, placed(found), causal=True, **options))
    if getattr(found, "positional", False) or getattr(found, "learned", False):
        return
    p = np.random.default_rng(5).permutation(N)
    k, v = normal(2, 2, N, D_K), normal(3, 2, N, 7)
    expected, bound = definition(q[:2], k, v, found)
    close(linear_attention(q[:2], k[:, p], v[:, p], found), expected, bound)
    packed = linear_attention(q[:2], k, v, found, cu_seqlens=[0, 3, 3, N])
    close(packed[:, :3], *definition(q[:2, :3], k[:, :3], v[:, :3], found))


@pytest.mark.parametrize("name", [n for n in MAPS if MAPS[n].averages])
def test_constant(road: str, name: str) -> None:
    """Law 7: an average of equal values is that value, where anything is seen at all."""
    found = placed(MAPS[name])
    q, k, _ = inputs(6, (2,), N, D_K, 1, np.float32)
    v = np.full((2, N, 3), 2.5, np.float32)
    for causal in (False, True):
        expected, bound = definition(q, k, v, found, 0.0, causal=causal)
        seen = expected != 0
        assert seen.mean() > 0.9
        out = linear_attention(q, k, v, found, 0.0, causal=causal)
        close(out, np.where(seen, 2.5, 0.0), bound, causal)


@pytest.mark.parametrize("eps", [None, 1e-6])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@every_map
def test_keys_of_a_hundred(road: str, dtype: str, name: str, eps: float | None) -> None:
    """Finite and right for keys of +-100, against the oracle with its exponents apart."""
    found, kind = MAPS[name], DTYPES[dtype]
    signs = np.random.default_rng(7).choice([-100.0, 100.0], size=(2, N, D_K))
    k = signs.astype(kind)
    q = [normal(8, N, D_K), np.random.default_rng(9).choice([-100.0, 100.0], size=(N, D_K))]
    v = normal(10, N, 7, dtype=kind)
    for queries in q:
        queries = queries.astype(kind)
        for causal in (False, True):
            expected, bound = definition(queries, k, v, placed(found), eps, causal=causal)
            assert np.isfinite(expected).all()
            out = linear_attention(queries, k, v, placed(found), eps, causal=causal)
            assert np.isfinite(out.astype(np.float32)).all()
            close(out, expected, bound, causal)
        state = State.zeros((2,), found.width(D_K), 7, found, kind)  # type: ignore[arg-type]
        rows = np.broadcast_to(queries, k.shape), k, np.broadcast_to(v, (2, N, 7))
        close(steps(state, *rows, 0, eps=eps), expected, bound, "steps")


def test_causal_favor_with_the_last_key_scaled() -> None:
    q, k, v = inputs(11, (2,), 300, 64, 64, np.float32)
    for favor in (feature_maps.favor(128), feature_maps.favor(128, kind="hyperbolic")):
        out = linear_attention(q, k, v, favor, causal=True)
        k[:, -1] *= 20
        again = linear_attention(q, k, v, favor, causal=True)
        same_bits(out[:, :-1], again[:, :-1])
        assert np.isfinite(again).all()


# ------------------------------------------------------------------------------------- positions


def test_cosformer_between_lengths_that_differ() -> None:
    """Queries may stand elsewhere than keys: the positions go with each call."""
    cosformer = feature_maps.cosformer(50)
    q, k, v = normal(1, 3, D_K), normal(2, 20, D_K), normal(3, 20, 2)
    state = State.of(k, v, cosformer.at(range(20)))
    out = state.at([30, 40, 50]).query(q, 0.0)
    weights = np.maximum(q, 0) @ np.maximum(k, 0).T
    weights *= np.cos(np.pi / 100 * (np.array([30, 40, 50])[:, None] - np.arange(20)))
    np.testing.assert_allclose(out, weights @ v / weights.sum(-1, keepdims=True), rtol=1e-12)


def test_positions_of_batches() -> None:
    """Left padding: rows of a batch stand at positions of their own."""
    cosformer = feature_maps.cosformer(50)
    q, k, v = inputs(1, (2,), 9, D_K, 2, np.float64)
    where = np.array([[0, 0, 0, 1, 2, 3, 4, 5, 6], list(range(9))])
    out = linear_attention(q, k, v, cosformer.at(where), causal=True)
    for b in range(2):
        alone = linear_attention(q[b], k[b], v[b], cosformer.at(where[b]), causal=True)
        np.testing.assert_allclose(out[b], alone, rtol=1e-13)


# --------------------------------------------------------------------------------- other libraries


@every_map
def test_tensors(name: str) -> None:
    """`project` takes torch's tensors, and gradients go through it."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch, "tensor"):  # the folder tests/torch
        pytest.skip("needs torch")
    found = placed(MAPS[name])
    x = normal(1, N, D_K)
    tensor = torch.tensor(x, requires_grad=True)
    if found.project is None:
        return
    projected = found.project(tensor)
    np.testing.assert_allclose(projected.detach().numpy(), found.project(x), rtol=1e-12, atol=1e-12)
    projected.sum().backward()
    assert torch.isfinite(tensor.grad).all()
    assert found.project(tensor.to(torch.bfloat16)).dtype == torch.float32


# ------------------------------------------------------------------------------- a map of one's own


def test_a_map_is_one_class_in_one_file(tmp_path: Path, monkeypatch: Any) -> None:
    """The class of docs/extending.md, run there too, passes what the catalogue passes."""
    text = (ROOT / "docs" / "extending.md").read_text("utf-8")
    begin = text.index("from dataclasses import dataclass")
    (tmp_path / "one_file.py").write_text(text[begin : text.index("```", begin)], "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        importlib.import_module("one_file")
        kind = feature_maps.catalogue()["shifted_relu"]
        assert isinstance(kind, type)
        MAPS["shifted_relu"] = found = kind()
        KERNELS["shifted_relu"] = lambda f, q, k, i, j: dot(
            relu([a + f.by for a in q]), relu([a + f.by for a in k])
        )
        assert feature_maps.get("shifted_relu(by=2.0)").by == 2.0  # type: ignore[attr-defined]
        test_what_a_map_says_of_itself(found.name)
        test_half_precision_is_widened(found.name)
        test_kernel(found.name)
        for dtype in DTYPES:
            test_definition("", dtype, found.name)
            test_definition_causal("", dtype, found.name)
        test_prefix("", found.name)
        test_monoid("", found.name)
        test_mask_batch_and_permutation("", found.name)
        test_constant("", found.name)
        test_keys_of_a_hundred("", "bfloat16", found.name, 1e-6)
    finally:
        MAPS.pop("shifted_relu", None)
        KERNELS.pop("shifted_relu", None)
        feature_maps._base._FAMILIES.pop("shifted_relu", None)  # type: ignore[attr-defined]


# ------------------------------------------------------------ queries with weights of their own


@pytest.mark.parametrize("kind", ["hedgehog", "t2r", "performer_learned"])
def test_queries_with_weights_of_their_own(kind: str) -> None:
    """phi_q(q) . phi_k(k): as if each side had been mapped before, in every form and in states."""
    family: Any = FAMILIES[kind]
    rng = np.random.default_rng(3)
    own = {"query_weight": rng.standard_normal(W.shape), "query_bias": rng.standard_normal(B.shape)}
    found = family(W, B, **own)
    for_q, for_k = family(own["query_weight"], own["query_bias"]), family(W, B)
    assert found != for_k
    assert "query_weight=7x5" in found.name
    assert pickle.loads(pickle.dumps(found)) == found
    q, k = rng.standard_normal((2, 2, 40, 5))
    v = rng.standard_normal((2, 40, 3))
    plain = FeatureMap("mapped before", found.kernel, eps=found.eps)  # the kernel alone
    mapped = for_q.project(q), for_k.project(k), v
    for causal in (False, True):
        expected = linear_attention(*mapped, plain, causal=causal)
        out = linear_attention(q, k, v, found, causal=causal)
        np.testing.assert_allclose(out, expected, rtol=1e-12)
        right = reference.double_sum(q, k, v, found, causal=causal)
        np.testing.assert_allclose(out, right, rtol=1e-9)
    whole = linear_attention(q, k, v, found)
    state = State.of(k[:, :-1], v[:, :-1], found)
    last = state.step(q[:, -1:], k[:, -1:], v[:, -1:])
    np.testing.assert_allclose(last, whole[:, -1:], rtol=1e-9)
    np.testing.assert_allclose(state.query(q), whole, rtol=1e-9)


def test_queries_of_more_heads_have_more_weights() -> None:
    rng = np.random.default_rng(4)
    found = feature_maps.hedgehog(
        rng.standard_normal((2, 7, 5)), query_weight=rng.standard_normal((6, 7, 5))
    )
    q, k, v = rng.standard_normal((6, 11, 5)), *rng.standard_normal((2, 2, 11, 5))
    out = linear_attention(q, k, v, found, causal=True, enable_gqa=True)
    for head in range(6):
        one = feature_maps.hedgehog(found.weight[head // 3], query_weight=found.query_weight[head])
        alone = linear_attention(q[head], k[head // 3], v[head // 3], one, causal=True)
        np.testing.assert_allclose(out[head], alone, rtol=1e-12)
