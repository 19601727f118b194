"""Faults that users met in other implementations of this formula, each with the right value.

The numbers are the rows of the project's list of faults. Rows about gradients and torch come with
the torch front end; 28 and 29 (installing, importing) are tested by the gate and test_imports.py.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import cases
import ml_dtypes
import numpy as np
import pytest

from linattn import State, linear_attention, plan

DTYPES = list(cases.DTYPES)


def within(out: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, **options: object) -> None:
    name = options.pop("feature_map", None)
    expected, bound = cases.definition(q, k, v, name, options.pop("eps", None), **options)
    cases.close(out, expected, bound)


def normal(seed: int, *shape: int, dtype: object = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# 1 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("x", [-0.5, -6.0, -16.0, -40.0])
def test_01_elu1_does_not_cancel(backend: str, dtype: str, x: float) -> None:
    """phi(x) = exp(x) to the precision of the dtype; a single feature shows it through eps."""
    dtype = cases.DTYPES[dtype]
    key = np.full((1, 1), x, dtype)
    one = np.ones((1, 1), dtype)
    # q = 0: phi(q) = 1, so the unnormalised output is phi(k) itself
    phi = linear_attention(np.zeros((1, 1), dtype), key, one, normalize=False)
    exact = np.exp(np.float64(key[0, 0]))
    info = ml_dtypes.finfo(dtype)
    assert abs(float(phi[0, 0]) - exact) <= 3 * float(info.eps) * exact + float(
        info.smallest_subnormal
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_01_one_token_far_down(backend: str, dtype: str) -> None:
    d, eps = 7, 1e-6
    x = np.full((1, d), -20.0, cases.DTYPES[dtype])
    v = np.full((1, 3), 1.5, cases.DTYPES[dtype])
    phi2 = d * np.exp(-40.0)
    right = 1.5 * phi2 / (phi2 + eps)
    out = linear_attention(x, x, v, eps=eps).astype(float)
    step = float(ml_dtypes.finfo(x.dtype).eps)
    tiny = float(ml_dtypes.finfo(x.dtype).smallest_subnormal)
    np.testing.assert_allclose(out, right, rtol=4 * step, atol=tiny)
    # without eps nothing hides it, down to where a product of two phi is no float any more
    for far in (-20.0, -48.0, -60.0, -100.0):
        x = np.full((1, d), far, cases.DTYPES[dtype])
        for causal in (False, True):
            out = linear_attention(x, x, v, eps=0.0, causal=causal).astype(float)
            np.testing.assert_allclose(out, 1.5, rtol=4 * step)


def test_01_phi_of_zero(backend: str) -> None:
    zero, one = np.zeros((1, 1), np.float32), np.ones((1, 1), np.float32)
    assert linear_attention(zero, zero, one, normalize=False)[0, 0] == 1


# 2, 3 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("causal", [False, True])
def test_02_half_precision_sums(backend: str, dtype: str, causal: bool) -> None:
    n = 20_000 if backend != "array" or not causal else 4_000
    x = np.full((n, 3), 4.0, cases.DTYPES[dtype])
    v = np.ones((n, 2), cases.DTYPES[dtype])
    assert (linear_attention(x, x, v, causal=causal) == 1).all()


def test_03_float32_sums_do_not_saturate(backend: str) -> None:
    n = 2**24 + 12_345 if backend != "array" else 2**21 + 11
    key = np.broadcast_to(np.float32(0.1), (n, 1))
    value = np.broadcast_to(np.float32(1.0), (n, 1))
    out, state = linear_attention(
        np.zeros((1, 1), np.float32), key, value, normalize=False, return_state=True
    )
    exact = n * (1 + np.float64(np.float32(0.1)))
    # all terms are equal, so their roundings add up within a block, and only there
    allowed = cases.C_EQUAL * float(np.finfo(np.float32).eps) * exact
    assert abs(float(out[0, 0]) - exact) <= allowed
    assert abs(float(state.k_sum[0]) - exact) <= allowed


# 4 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [None, 0.0, 1e-6])
def test_04_zero_rows(backend: str, dtype: str, eps: float | None) -> None:
    """All of phi(q) or phi(k) is 0: the output is 0 and never NaN, whatever eps."""
    n = 67
    positive = np.abs(normal(1, n, 5)).astype(cases.DTYPES[dtype])
    negative = -positive
    v = normal(2, n, 3).astype(cases.DTYPES[dtype])
    for q, k in ((negative, positive), (positive, negative), (negative, negative)):
        for causal in (False, True):
            out = linear_attention(q, k, v, "relu", eps, causal=causal)
            assert (out == 0).all()
        for order in ("linear", "quadratic"):
            assert (linear_attention(q, k, v, "relu", eps, order=order) == 0).all()
        assert (State.of(k, v, "relu").query(q, eps) == 0).all()
        state = State.zeros((), 5, 3, "relu", dtype=cases.DTYPES[dtype])
        assert (state.step(q[:1], k[:1], v[:1], eps=eps) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_04_eps_is_added_to_the_denominator_everywhere(backend: str, dtype: str) -> None:
    x = np.full((1, 1), 0.0, cases.DTYPES[dtype])  # phi = 1, so the denominator is 1 + eps
    v = np.ones((1, 1), cases.DTYPES[dtype])
    results = [
        linear_attention(x, x, v, eps=3.0, order="linear"),
        linear_attention(x, x, v, eps=3.0, order="quadratic"),
        linear_attention(x, x, v, eps=3.0, causal=True),
        State.of(x, v).query(x, eps=3.0),
        State.zeros((), 1, 1, dtype=cases.DTYPES[dtype]).step(x, x, v, eps=3.0),
        linear_attention(x, x, v, "exp", 3.0),
        linear_attention(x, x, v, "exp", 3.0, causal=True),
    ]
    assert all(float(out[0, 0]) == 0.25 for out in results)


# 5, 6, 7 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["elu1", "exp", "identity"])
@pytest.mark.parametrize("poison", [0.0, np.nan, np.inf, 1e30])
def test_05_06_masked_keys_are_as_if_removed(
    backend: str, name: str, causal: bool, poison: float
) -> None:
    n, d, d_v = 131, 5, 3
    q, k, v = normal(3, n, d), normal(4, n, d), normal(5, n, d_v)
    mask = np.random.default_rng(6).random(n) < 0.6
    mask[0] = True
    if name == "identity":
        q, k = np.abs(q), np.abs(k)
    poisoned_k, poisoned_v = k.copy(), v.copy()
    if poison:
        poisoned_k[~mask], poisoned_v[~mask] = poison, poison
    out = linear_attention(q, poisoned_k, poisoned_v, name, causal=causal, key_mask=mask)
    if causal:
        for t in (0, 1, 63, 64, 130):
            seen = mask[: t + 1]
            last, keys, values = q[t : t + 1], k[: t + 1][seen], v[: t + 1][seen]
            within(out[t : t + 1], last, keys, values, feature_map=name)
    else:
        within(out, q, k[mask], v[mask], feature_map=name)


@pytest.mark.parametrize("name", ["elu1", "exp", "relu"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("eps", [None, 0.0])
def test_07_fully_masked(backend: str, name: str, causal: bool, eps: float | None) -> None:
    q, k, v = normal(7, 70, 5), normal(8, 70, 5), normal(9, 70, 3)
    out = linear_attention(q, k, v, name, eps, causal=causal, key_mask=np.zeros(70, bool))
    assert (out == 0).all()
    late = np.arange(70) >= 40  # rows before 40 see no key in the causal form
    out = linear_attention(q, k, v, name, eps, causal=True, key_mask=late)
    assert (out[:40] == 0).all()
    assert np.isfinite(out).all()


# 8, 9, 10, 11, 12 ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["elu1", "exp", "softplus"])
@pytest.mark.parametrize("n", [5, 33, 64, 131, 1031])
@pytest.mark.parametrize("change", ["x20", "nan"])
def test_08_no_look_ahead(backend: str, name: str, n: int, change: str) -> None:
    q, k, v = normal(10, n, 7), normal(11, n, 7), normal(12, n, 3)
    before = linear_attention(q, k, v, name, causal=True)
    changed = k.copy()
    changed[-1] = changed[-1] * 20 if change == "x20" else np.nan
    after = linear_attention(q, changed, v, name, causal=True)
    cases.same_bits(before[:-1], after[:-1])
    assert not np.array_equal(before[-1], after[-1])


@pytest.mark.parametrize("causal", [False, True])
def test_09_every_length(backend: str, causal: bool) -> None:
    for n in range(1, 131):
        q, k, v = normal(n, n, 5), normal(n + 1000, n, 5), normal(n + 2000, n, 3)
        within(linear_attention(q, k, v, causal=causal), q, k, v, causal=causal)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True])
def test_10_every_width(backend: str, dtype: str, causal: bool) -> None:
    for d in (1, 3, 8, 17, 65):
        for d_v in (1, 3, 8, 17, 65):
            q, k = (normal(s, 67, d, dtype=cases.DTYPES[dtype]) for s in (13, 14))
            v = normal(15, 67, d_v, dtype=cases.DTYPES[dtype])
            within(linear_attention(q, k, v, causal=causal), q, k, v, causal=causal)


@pytest.mark.parametrize(("n_q", "n_k"), [(5, 7), (7, 5), (1, 64), (64, 1)])
def test_11_causal_lengths_that_differ(backend: str, n_q: int, n_k: int) -> None:
    q, k, v = normal(16, n_q, 3), normal(17, n_k, 3), normal(18, n_k, 2)
    with pytest.raises(ValueError, match=r"(?s)causal.*state"):
        linear_attention(q, k, v, causal=True)
    within(linear_attention(q, k, v), q, k, v)


def test_12_the_right_axis(backend: str) -> None:
    heads, n, d, d_v = 3, 41, 5, 2
    q, k, v = normal(19, heads, n, d), normal(20, heads, n, d), normal(21, heads, n, d_v)
    out = linear_attention(q, k, v, causal=True)
    for h in range(heads):
        within(out[h], q[h], k[h], v[h], causal=True)


# 13, 14, 19 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["elu1", "exp"])
def test_13_the_state_is_carried(backend: str, name: str) -> None:
    n = 37 + 5 + 3
    q, k, v = normal(22, n, 5), normal(23, n, 5), normal(24, n, 3)
    first, state = linear_attention(q[:37], k[:37], v[:37], name, causal=True, return_state=True)
    second, state = linear_attention(
        q[37:42], k[37:42], v[37:42], name, causal=True, state=state, return_state=True
    )
    steps = [state.step(*(x[t : t + 1] for x in (q, k, v))) for t in range(42, n)]
    out = np.concatenate([first, second, *steps])
    within(out, q, k, v, feature_map=name, causal=True)


@pytest.mark.parametrize("name", ["elu1", "exp"])
def test_14_branches_of_a_state(backend: str, name: str) -> None:
    q, k, v = normal(25, 40, 5), normal(26, 40, 5), normal(27, 40, 3)
    root = State.of(k[:30], v[:30], name)
    before = root.copy()
    left, right = root.copy(), root.copy()
    one = left.step(q[30:31], k[30:31], v[30:31])
    two = right.step(q[31:32], k[31:32], v[31:32])
    _, three = linear_attention(
        q[32:], k[32:], v[32:], name, causal=True, state=root, return_state=True
    )
    cases.same_states(root, before)
    assert three is not root
    within(one, q[30:31], k[:31], v[:31], feature_map=name)
    keep = np.r_[0:30, 31]
    within(two, q[31:32], k[keep], v[keep], feature_map=name)


def test_19_inputs_keep_their_bits(backend: str) -> None:
    # Widths of whole vectors: the kernels read such rows where they lie.
    q, k, v = normal(28, 70, 16), normal(29, 70, 16), normal(30, 70, 64)
    k[3], v[5] = np.nan, np.inf
    mask = np.arange(70) % 3 > 0
    mask[[3, 5]] = False
    kept = [x.copy() for x in (q, k, v, mask)]
    for causal in (False, True):
        linear_attention(q, k, v, causal=causal, key_mask=mask)
    for x, before in zip((q, k, v, mask), kept, strict=True):
        cases.same_bits(x.view("u1"), before.view("u1"))


# 21, 23 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("eps", [None, 1e-6])
@pytest.mark.parametrize("causal", [False, True])
def test_21_exponential_maps_stay_finite(
    backend: str, dtype: str, eps: float | None, causal: bool
) -> None:
    n = 131
    k = (100 * np.sign(normal(31, n, 5))).astype(cases.DTYPES[dtype])
    q = (100 * np.sign(normal(32, n, 5))).astype(cases.DTYPES[dtype])
    v = normal(33, n, 3, dtype=cases.DTYPES[dtype])
    out = linear_attention(q, k, v, "exp", eps, causal=causal)
    assert np.isfinite(out.astype(float)).all()
    within(out, q, k, v, feature_map="exp", eps=eps, causal=causal)


def test_21_no_scale_for_all_features(backend: str) -> None:
    """Both products are exp(0): one scale a row would lose them."""
    k, q = np.array([[100.0, -100.0]], np.float32), np.array([[-100.0, 100.0]], np.float32)
    v = np.array([[3.0]], np.float32)
    assert linear_attention(q, k, v, "exp")[0, 0] == 3
    assert linear_attention(q, k, v, "exp", causal=True)[0, 0] == 3
    assert linear_attention(q, k, v, "exp", order="quadratic")[0, 0] == 3
    assert abs(float(linear_attention(q, k, v, "exp", normalize=False)[0, 0]) - 6) < 1e-4


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (np.ones(7, np.uint8), r"key_mask.*bool.*uint8.*astype"),
        (np.ones(7, np.float32), r"key_mask.*bool.*float32.*!= 0"),
        (np.ones(6, bool), r"key_mask.*7"),
        (np.ones((2, 7), bool), r"key_mask.*mask\[:, None\]"),
        ([True] * 7, None),
        (np.ones(7, bool), None),
        (np.ones((2, 1, 7), bool), None),
        (np.ones((1, 2, 7), bool), None),
    ],
)
def test_23_masks(backend: str, mask: object, words: str | None) -> None:
    q, k, v = normal(34, 2, 2, 7, 3), normal(35, 2, 2, 7, 3), normal(36, 2, 2, 7, 2)
    if words is None:
        try:
            out = linear_attention(q, k, v, key_mask=mask)
        except (TypeError, ValueError) as error:
            assert "key_mask" in str(error)  # a list: refused by name, not misread
        else:
            within(out, q, k, v)
    else:
        with pytest.raises((TypeError, ValueError), match="(?s)" + words):
            linear_attention(q, k, v, key_mask=mask)


# 24, 25 ----------------------------------------------------------------------------------------


def test_24_the_crossover_is_printable() -> None:
    assert plan(16, 16, 64).order == "quadratic"
    assert plan(1024, 1024, 64).order == "linear"
    assert "crossover" in str(plan(128, 128, 64)).lower()


MEMORY = """
    import resource, sys
    import numpy as np
    from linattn import linear_attention
    n = int(sys.argv[1])
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, 64), dtype=np.float32) for _ in range(3))
    out = np.ones((n, 64), np.float32)
    few = slice(0, 4096)
    for causal in (False, True):  # threads, their stacks and scratch are there from now on
        linear_attention(q[few], k[few], v[few], causal=causal, out=out[few])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for causal in (False, True):
        linear_attention(q, k, v, causal=causal, out=out)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(not cases.CORE, reason="the compiled core is missing")
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak in KiB")
def test_25_memory_does_not_grow() -> None:
    """Causal and not, 16 times the length takes no more than 2 MiB of noise beside the arrays."""
    for n in (16_384, 262_144):
        code = textwrap.dedent(MEMORY)
        run = subprocess.run([sys.executable, "-c", code, str(n)], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        assert int(run.stdout) <= 2048, f"{run.stdout.strip()} KiB at n = {n}"


MANY_HEADS = """
    import resource
    import numpy as np
    from linattn import State, linear_attention, set_num_threads
    set_num_threads(2)
    heads = 4096
    q = np.broadcast_to(np.float32(0.5), (4 * heads, 3, 64))
    k = np.broadcast_to(np.float32(0.5), (heads, 3, 64))
    out = np.ones(q.shape, np.float32)
    few = slice(0, 64)
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    every = slice(None)
    for cut, options in ((few, {}), (every, {"order": "linear"}), (every, {"causal": True})):
        queries = slice(4 * len(k[cut]))
        linear_attention(q[queries], k[cut], k[cut], enable_gqa=True, out=out[queries], **options)
        if cut == few:
            before = peak()
    print(peak() - before)
"""


@pytest.mark.skipif(not cases.CORE, reason="the compiled core is missing")
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak in KiB")
def test_25_memory_does_not_grow_with_the_heads() -> None:
    """No state is kept for each of 4,096 heads: that would take 130 MiB and more."""
    code = textwrap.dedent(MANY_HEADS)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) <= 4096, f"{run.stdout.strip()} KiB"


# 26, 27, 30 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_26_empty_sequences(backend: str, causal: bool, kind: type) -> None:
    q, k, v = normal(37, 7, 3), normal(38, 7, 3), normal(39, 7, 2)
    cu = np.array([0, 3, 3, 7], kind)
    out, state = linear_attention(q, k, v, causal=causal, cu_seqlens=cu, return_state=True)
    for a, b in ((0, 3), (3, 7)):
        within(out[a:b], q[a:b], k[a:b], v[a:b], causal=causal)
    assert state.kv.shape == (3, 3, 2)
    assert (state.kv[1] == 0).all()
    assert (state.k_sum[1] == 0).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [7, 131, 1031])
def test_27_a_batch_of_one(backend: str, causal: bool, n: int) -> None:
    q, k, v = normal(40, 2, n, 5), normal(41, 2, n, 5), normal(42, 2, n, 3)
    both = linear_attention(q, k, v, causal=causal)
    for b in range(2):
        within(both[b], q[b], k[b], v[b], causal=causal)
        within(linear_attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], causal=causal)[0],
               q[b], k[b], v[b], causal=causal)  # fmt: skip


@pytest.mark.skipif(not cases.CORE, reason="the compiled core is missing")
def test_30_beyond_2_31_elements_without_memory() -> None:
    """A view of stride 0 with more than 2^31 elements: keys and values of one row each."""
    n, d = 2**21 + 3, 1031  # 2,162,168,949 elements
    key = np.broadcast_to(np.linspace(-1, 1, d, dtype=np.float32), (n, d))
    assert key.size > 2**31
    value = np.broadcast_to(np.float32(2.5), (n, 1))
    q = normal(43, 2, d)
    out = linear_attention(q, key[-1000:], value[-1000:])
    np.testing.assert_allclose(out, 2.5, rtol=1e-5)
    sparse = np.zeros(n, bool)
    sparse[[0, 5, n - 1]] = True  # whole blocks that are masked are passed over
    out = linear_attention(q, key, value, key_mask=sparse)
    np.testing.assert_allclose(out, 2.5, rtol=1e-5)


@pytest.mark.skipif(not cases.CORE, reason="the compiled core is missing")
@pytest.mark.skipif(
    sys.platform != "linux", reason="needs memory that is mapped when it is touched"
)
def test_30_beyond_2_31_elements_of_real_strides() -> None:
    n, d = 2**20 + 7, 2053
    k, v = np.zeros((n, d), np.float32), np.zeros((n, 1), np.float32)
    assert k.size > 2**31
    rows = np.array([0, 1, n // 2, n - 2, n - 1])
    k[rows], v[rows] = normal(44, 5, d), normal(45, 5, 1)
    mask = np.zeros(n, bool)
    mask[rows] = True
    q = normal(46, 3, d)
    within(linear_attention(q, k, v, key_mask=mask), q, k[rows], v[rows])
    # the last rows alone, by an offset of more than 2^31 elements
    within(linear_attention(q[:2], k[-2:], v[-2:]), q[:2], k[rows[-2:]], v[rows[-2:]])


@pytest.mark.skipif(not cases.CORE, reason="the compiled core is missing")
@pytest.mark.skipif(
    sys.platform != "linux", reason="needs memory that is mapped when it is touched"
)
@pytest.mark.parametrize(
    ("which", "causal"),
    [
        ("q", False),
        ("k", False),
        ("v", False),
        pytest.param("q", True, marks=pytest.mark.slow),
        pytest.param("k", True, marks=pytest.mark.slow),
    ],
)
def test_30_beyond_2_31_elements_all_of_them_read(which: str, causal: bool) -> None:
    """relu of 0 is 0, so that only the rows filled count; an index of 32 bits would miss them."""
    n, wide = 2**20 + 7, 2053
    shapes = {"q": (n, 3), "k": (n, 3), "v": (n, 2)}
    if which == "v":
        shapes["v"] = (n, wide)
    else:
        shapes["q"], shapes["k"] = (n, wide), (n, wide)
        for x in {"q", "k"} - {which}:  # the same row everywhere takes no memory
            shapes[x] = (1, wide)
    arrays = {x: np.zeros(shape, np.float16) for x, shape in shapes.items()}
    assert arrays[which].size > 2**31
    rows = np.array([0, 1, n // 2, n - 2, n - 1])
    for i, (x, array) in enumerate(arrays.items()):
        if len(array) == n:
            array[rows] = np.abs(normal(50 + i, 5, array.shape[1]))
        else:
            array[0, ::7] = 1
            arrays[x] = np.broadcast_to(array, (n, array.shape[1]))
    q, k, v = arrays["q"], arrays["k"], arrays["v"]
    if which == "v":  # and the output would be as large: take it where few rows exist
        q = q[rows]
    out = linear_attention(q, k, v, "relu", causal=causal)
    few = q[rows] if which != "v" else q
    if which != "q":
        found = out[rows] if which != "v" else out
        within(found, few, k[rows], v[rows], feature_map="relu", causal=causal)
    else:  # all keys are alike and the values that are not 0 stand in five of the rows
        weights = np.maximum(few.astype(float), 0) @ k[0].astype(float)
        for i, row in enumerate(rows):
            seen = row + 1 if causal else n
            total = v[rows[rows < seen]].astype(float).sum(0) * weights[i]
            right = total / (weights[i] * seen + 1e-6)
            np.testing.assert_allclose(out[row].astype(float), right, rtol=2e-3, atol=1e-7)


def far_apart(x: np.ndarray, axis: int) -> np.ndarray:
    """x with more than 2^31 bytes between its elements along an axis, in unmapped memory."""
    step = (2**31 // x.itemsize + 5) * x.itemsize
    room = np.zeros(step * (x.shape[axis] - 1) + x.nbytes, np.uint8).view(x.dtype)
    inner = np.moveaxis(np.zeros(np.delete(x.shape, axis), x.dtype)[None], 0, axis).strides
    strides = tuple(step if i == axis else s for i, s in enumerate(inner))
    view = np.lib.stride_tricks.as_strided(room, x.shape, strides)
    view[...] = x
    return view


@pytest.mark.skipif(
    sys.platform != "linux", reason="needs memory that is mapped when it is touched"
)
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("name", ["elu1", "exp"])
def test_30_strides_beyond_2_31_bytes(backend: str, name: str, axis: int) -> None:
    """Of batch elements, rows and features, forwards and backwards, of inputs and the output."""
    q, k, v = normal(60, 3, 3, 3), normal(61, 3, 3, 3), normal(62, 3, 3, 3)
    far = [far_apart(x, axis) for x in (q, k, v)]
    out = far_apart(np.full(q.shape, np.nan, np.float32), axis)
    back = (slice(None),) * axis + (slice(None, None, -1),)
    for options in ({"causal": True}, {"order": "linear"}, {"order": "quadratic"}):
        right = linear_attention(q, k, v, name, **options)
        assert linear_attention(*far, name, out=out, **options) is out
        cases.same_bits(np.array(out), right)
        flipped = linear_attention(*(x[back] for x in far), name, **options)
        again = linear_attention(*(np.array(x[back]) for x in (q, k, v)), name, **options)
        cases.same_bits(flipped, again)
