"""State: a monoid that remembers keys and values."""

import copy
import inspect
import pickle
import zipfile
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from cases import DTYPES, EPSILON, data

from linattn import State, feature_maps, linear_attention, reference

B, H, N, D, E = 2, 3, 67, 5, 13  # batch, heads, positions, features, value features
MAPS = feature_maps.names()

pytestmark = pytest.mark.usefixtures("either_backend")


def keys(n=N, **how):
    return data((B, H, n, D), (B, H, n, E), **how)


def true(state):
    """S and Z, with their scale multiplied in."""
    if state.log_scale is None:
        return state.kv, state.k_sum
    power = np.maximum(state.log_scale, -1000)
    return np.ldexp(state.kv, power[..., None]), np.ldexp(state.k_sum, power)


def same(a, b, rtol=1e-13):
    assert a.feature_map == b.feature_map
    assert a.batch_shape == b.batch_shape
    for x, y in zip(true(a), true(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol)


def bits(state):
    return [x.tobytes() for x in state.arrays().values()]


def close(got, q, k, v, feature_map=None, eps=None, factor=8, **how):
    """Within the bound of rounding: the reference's, a multiple of the dtype's epsilon."""
    exact = reference.double_sum(q, k, v, feature_map, eps, **how)
    bound = reference.error_bound(q, k, v, feature_map, eps, **how)
    assert got.shape == exact.shape
    epsilon = EPSILON[got.dtype.name]
    assert (
        np.abs(got.astype(np.float64) - exact) <= factor * epsilon * bound + 1e-7 * epsilon
    ).all()


# The sums


@pytest.mark.parametrize("name", MAPS)
def test_of(name):
    k, v = keys()
    state = State.of(k, v, name)
    phi = feature_maps.get(name)(k)
    S, Z = true(state)
    np.testing.assert_allclose(S, phi.swapaxes(-1, -2) @ v, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(Z, phi.sum(-2), rtol=1e-12, atol=1e-12)
    assert (state.batch_shape, state.D, state.d_v) == ((B, H), D, E)
    assert state.kv.dtype == state.k_sum.dtype == np.float64
    assert (state.log_scale is not None) == (name == "exp")


def test_attributes():
    state = State.zeros((B, H), D, E, "exp", np.float16)
    assert state.nbytes == B * H * D * (8 * E + 8 + 4)
    assert state.log_scale.dtype == np.int32
    assert (state.log_scale == -(2**30)).all()
    assert (state.kv == 0).all()
    assert State.zeros((B, H), D, E).nbytes == B * H * D * (8 * E + 8)
    assert repr(state) == (
        "State(batch_shape=(2, 3), D=5, d_v=13, feature_map='exp', dtype=float16)"
    )
    assert State.zeros(7, D, E).batch_shape == (7,)
    assert State.zeros((), D, E).dtype == np.float32
    assert State.zeros((), D, E, dtype=ml_dtypes.bfloat16).dtype.name == "bfloat16"


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("cuts", [[0, 67], [0, 1, 67], [0, 30, 30, 66, 67], range(68)], ids=str)
def test_any_split_merges_to_the_same(name, cuts):
    k, v = keys(scale=9.0 if name == "exp" else 1.0)
    whole = State.of(k, v, name)
    parts = [State.of(k[..., a:b, :], v[..., a:b, :], name) for a, b in pairwise(cuts)]
    left = State.zeros((B, H), D, E, name, np.float64)
    for part in parts:
        left = left.merge(part)
    right = State.zeros((B, H), D, E, name, np.float64)
    for part in reversed(parts):
        right = part + right
    absorbed = State.zeros((B, H), D, E, name, np.float64)
    for a, b in pairwise(cuts):
        assert absorbed.absorb(k[..., a:b, :], v[..., a:b, :]) is absorbed
    for other in (left, right, absorbed):
        same(whole, other, 1e-11)


@pytest.mark.parametrize("name", MAPS)
def test_zeros_change_no_bit(name):
    k, v = keys()
    v[..., :3] *= -0.0
    state = State.of(k, v, name)
    zeros = State.zeros((B, H), D, E, name)
    assert bits(state + zeros) == bits(zeros + state) == bits(state)
    empty = State.of(k[..., :0, :], v[..., :0, :], name)
    assert bits(empty) == bits(zeros)
    before = bits(state)
    state.absorb(k[..., :0, :], v[..., :0, :])
    state.absorb(k, v, np.zeros(N, bool))
    assert bits(state) == before


def test_merge_broadcasts_and_promotes():
    k, v = keys(dtype=np.float16)
    one, all_ = State.of(k[0, 1], v[0, 1]), State.of(k.astype(np.float32), v.astype(np.float32))
    both = one + all_
    assert both.batch_shape == (B, H)
    assert both.dtype == np.float32
    np.testing.assert_allclose(both.kv, all_.kv + one.kv)
    assert bits(both) == bits(all_ + one)


def test_mask_is_as_if_removed():
    k, v = keys()
    mask = np.random.default_rng(1).random((B, 1, N)) < 0.4
    bad_k, bad_v = k.copy(), v.copy()
    hidden = np.broadcast_to(~mask, (B, H, N))
    bad_k[hidden], bad_v[hidden] = np.nan, np.inf
    for name in MAPS:
        state = State.of(bad_k, bad_v, name, mask)
        for b in range(B):
            seen = mask[b, 0]
            same(state[b], State.of(k[b][:, seen], v[b][:, seen], name), 1e-12)


# Queries


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("name", MAPS)
def test_query(name, dtype):
    q, k, v = data((B, H, 7, D), (B, H, N, D), (B, H, N, E), dtype=dtype)
    state = State.of(k, v, name)
    if name != "identity":
        got = state.query(q)
        assert got.dtype == dtype
        close(got, q, k, v, name)
    close(state.query(q, normalize=False), q, k, v, name, normalize=False)
    numerator, denominator = state.query_parts(q)
    assert numerator.dtype == denominator.dtype == np.result_type(dtype, np.float32)
    assert (numerator.shape, denominator.shape) == ((B, H, 7, E), (B, H, 7, 1))
    close(numerator, q, k, v, name, normalize=False)
    close(denominator, q, k, np.ones((B, H, N, 1)), name, normalize=False)


def test_query_of_one_state_by_many():
    q, k, v = data((7, B, H, 11, D), (H, N, D), (H, N, E))
    state = State.of(k, v)
    close(state.query(q, 0.25), q, k, v, eps=0.25)
    out = np.full((7, B, H, 11, E), np.nan)
    assert state.query(q, out=out) is out
    close(out, q, k, v)
    grouped = data((7, 2 * H, 11, D))[0]
    close(state.query(grouped, None, True), grouped, k, v, enable_gqa=True)


def test_query_dtype_promotes_with_the_state():
    k, v = keys()
    half = State.of(k.astype(np.float16), v.astype(np.float16))
    assert half.query(k.astype(np.float32)).dtype == np.float32
    assert half.query(k.astype(ml_dtypes.bfloat16)).dtype == np.float32
    assert half.query(k.astype(np.float16)).dtype == np.float16
    half.absorb(k, v)
    assert half.dtype == np.float64
    assert half.query(k.astype(np.float16)).dtype == np.float64


# Steps


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_steps_are_the_causal_form(name, dtype):
    q, k, v = data((B, H, 7, D), (B, H, 7, D), (B, H, 7, E), dtype=dtype)
    state = State.zeros((B, H), D, E, name, dtype)
    how = {"normalize": name != "identity"}
    steps = [
        state.step(q[..., t : t + 1, :], k[..., t : t + 1, :], v[..., t : t + 1, :], **how)
        for t in range(7)
    ]
    got = np.concatenate(steps, -2)
    assert got.dtype == state.dtype == dtype
    close(got, q, k, v, name, causal=True, **how)
    same(state, State.of(k, v, name), 30 * EPSILON[np.dtype(dtype).name])


def test_prefill_then_steps_through_save_and_load(tmp_path):
    q, k, v = data((B, H, N, D), (B, H, N, D), (B, H, N, E))
    for name in ("elu1", "exp"):
        head, state = linear_attention(
            q[..., :37, :], k[..., :37, :], v[..., :37, :], name, causal=True, return_state=True
        )
        state.save(tmp_path / "state")
        state = State.load(tmp_path / "state")
        middle, state = linear_attention(
            *(x[..., 37:42, :] for x in (q, k, v)),
            name,
            causal=True,
            state=state,
            return_state=True,
        )
        tail = [state.step(*(x[..., t : t + 1, :] for x in (q, k, v))) for t in range(42, N)]
        close(np.concatenate([head, middle, *tail], -2), q, k, v, name, causal=True)


def test_step_shares_heads_and_writes_to_out():
    q, k, v = data((B, 2 * H, 1, D), (B, H, 1, D), (B, H, 1, E))
    state = State.zeros((B, H), D, E, dtype=np.float64)
    out = np.full((B, 2 * H, 1, E), np.nan)
    assert state.step(q, k, v, 1e-3, True, out=out) is out
    close(out, q, k, v, eps=1e-3, enable_gqa=True)
    # a key for all of a batch, in an output of a dtype that isn't the keys'
    half = [x.astype(np.float16) for x in (q[0, :H], k[0], v[0])]
    got = state.step(*half)
    assert got.dtype == state.dtype == np.float64
    assert got.shape == (B, H, 1, E)


def test_a_step_that_fails_changes_nothing():
    q, k, v = data((B, H, 1, D), (B, H, 1, D), (B, H, 1, E))
    state = State.of(k, v)
    before = bits(state)
    for arguments in [(q[..., 1:], k, v), (q, k, v[..., 1:]), (q[0, :2], k, v), (q, k, v, -1.0)]:
        with pytest.raises(ValueError):
            state.step(*arguments)
    assert bits(state) == before


# Copies


def test_everything_else_leaves_a_state_alone():
    k, v = keys()
    for name in ("elu1", "exp"):
        state = State.of(k, v, name)
        before = bits(state)
        branches = [state.copy(), copy.copy(state), copy.deepcopy(state), state.detach(), state[:]]
        branches += [State.from_arrays(**state.arrays(), feature_map=name), state + state]
        for branch in branches:
            branch.absorb(k, v)
            branch.reset(0)
        linear_attention(k, k, v, name, state=state, return_state=True)[1].absorb(k, v)
        state.query(k)
        assert bits(state) == before
        for view in state.arrays().values():
            assert not view.flags.writeable
            assert any(np.shares_memory(view, x) for x in (state.kv, state.k_sum, state.log_scale))


def test_two_branches():
    q, k, v = keys(1)[0], *keys(3)
    trunk = State.of(k[..., :1, :], v[..., :1, :])
    left, right = trunk.copy(), trunk.copy()
    a = left.step(q, k[..., 1:2, :], v[..., 1:2, :])
    b = right.step(q, k[..., 2:, :], v[..., 2:, :])
    close(a, q, k[..., :2, :], v[..., :2, :])
    close(b, q, k[..., ::2, :], v[..., ::2, :])
    close(trunk.query(q), q, k[..., :1, :], v[..., :1, :])


@pytest.mark.parametrize(
    "index",
    [0, -1, (1, 2), slice(1, None), (..., 0), None, ([1, 0, 1], 2), np.eye(2, 3) == 1],
    ids=str,
)
def test_index(index):
    k, v = keys()
    state = State.of(k, v, "exp")
    numbers = np.arange(B * H).reshape(B, H)[index]
    got = state[index]
    assert got.batch_shape == numbers.shape
    flat = state.kv.reshape(-1, D, E), state.log_scale.reshape(-1, D)
    assert (got.kv == flat[0][numbers]).all()
    assert (got.log_scale == flat[1][numbers]).all()
    assert got.kv.flags.c_contiguous
    assert got.k_sum.flags.c_contiguous
    assert not np.shares_memory(got.kv, state.kv)


def test_reset():
    k, v = keys()
    for name in ("elu1", "exp"):
        state = State.of(k, v, name)
        fresh = State.zeros((B, H), D, E, name)
        kept = bits(state[0])
        assert state.reset(1) is state
        assert bits(state[1]) == bits(fresh[1])
        assert bits(state[0]) == kept
        assert bits(state.reset()) == bits(fresh)
        same(state.absorb(k, v), State.of(k, v, name))


# Files


@pytest.mark.parametrize("name", MAPS)
def test_save_and_load(name, tmp_path):
    k, v = keys(dtype=ml_dtypes.bfloat16)
    state = State.of(k, v, name)
    path = tmp_path / "a state"
    state.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["a state"]
    back = State.load(path)
    assert bits(back) == bits(state)
    assert back.feature_map is state.feature_map
    assert back.dtype == state.dtype
    assert bits(State.load(str(path), name)) == bits(state)
    with pytest.raises(ValueError, match=f"feature_map: expected '{name}'"):
        State.load(path, "relu" if name != "relu" else "elu1")
    with zipfile.ZipFile(path) as file:
        assert all(file.read(n)[:6] == b"\x93NUMPY" for n in file.namelist())


def test_a_callable_is_passed_to_load(tmp_path):
    def square(x):
        return x * x

    k, v = keys()
    state = State.of(k, v, square)
    state.save(tmp_path / "state.npz")
    with pytest.raises(
        ValueError, match=r"square.* cannot hold; pass State.load\(path, feature_map"
    ):
        State.load(tmp_path / "state.npz")
    with pytest.raises(ValueError, match="square.*, got 'relu'"):
        State.load(tmp_path / "state.npz", "relu")
    back = State.load(tmp_path / "state.npz", square)
    same(back + state, state + state)
    close(back.query(k), k, k, v, square, eps=1e-6)
    with pytest.raises(ValueError, match="different maps"):
        back.merge(State.of(k, v, lambda x: x * x))


def test_a_merge_has_no_grouped_heads_to_advise():
    with pytest.raises(ValueError, match=r"2 in self, 7 in other; insert an axis of 1") as error:
        State.zeros((2, 3), D, E).merge(State.zeros((7, 3), D, E))
    assert "enable_gqa" not in str(error.value)


def test_saving_where_nothing_can_be(tmp_path):
    """The error names the file that was asked for, not the one it is first written to."""
    path = tmp_path / "missing" / "x.npz"
    with pytest.raises(FileNotFoundError) as error:
        State.of(*keys()).save(path)
    assert error.value.filename == str(path)


def test_files_that_are_none(tmp_path):
    path = tmp_path / "x.npz"
    state = State.of(*keys())
    for content in (b"", b"PK", b"not a state" * 99):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="path: expected a file that State.save wrote, got"):
            State.load(path)
    np.savez(path, kv=state.kv)
    with pytest.raises(ValueError, match="path: expected"):
        State.load(path)
    np.save(tmp_path / "x.npy", state.kv)
    with pytest.raises(ValueError, match="path: expected"):
        State.load(tmp_path / "x.npy")
    state.save(path)
    whole = path.read_bytes()
    for size in range(0, len(whole), len(whole) // 7):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="path: expected"):
            State.load(path)
    with pytest.raises(FileNotFoundError):
        State.load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError):
        state.save(tmp_path / "no" / "such" / "folder")


def test_an_interrupted_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "state"
    state = State.of(*keys())
    state.save(path)
    before = path.read_bytes()

    def broken(file, **arrays):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", broken)
    with pytest.raises(OSError, match="No space left"):
        (state + state).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_pickle():
    state = State.of(*keys(), "exp")
    back = pickle.loads(pickle.dumps(state))
    assert bits(back) == bits(state)
    assert back.feature_map is feature_maps.exp
    same(back + state, state + state)


def test_from_arrays_of_true_sums():
    q, k, v = data((7, D), (N, D), (N, E))
    phi = np.exp(k)
    state = State.from_arrays(phi.T @ v, phi.sum(0), feature_map="exp", dtype=np.float64)
    assert state.log_scale is not None
    close(state.query(q), q, k, v, "exp")
    big = State.from_arrays(
        np.float32(phi.T @ v), np.float16(phi.sum(0)), feature_map=lambda x: np.exp(x)
    )
    assert big.kv.dtype == big.k_sum.dtype == np.float64
    assert big.dtype == np.float32


# Exponential maps


def test_exponential_sums_do_not_overflow():
    k = np.float32([[100, -100], [-1000, 1000]])
    v = np.float32([[1], [2]])
    state = State.of(k, v, "exp")
    assert np.isfinite(state.kv).all()
    assert (np.abs(state.kv) < 1e3).all()
    assert state.log_scale.tolist() == [round(100 / np.log(2)), round(1000 / np.log(2))]
    q = np.float32([[0, 0], [0, -900.0], [-1e4, -1e4], [900, 0], [901, 0]])
    # weights of the two keys: exp(0 + 1000) wins; exp(0 + 100) against exp(-900 + 1000); ...
    got = state.query(q)
    np.testing.assert_allclose(got[:, 0], [2, 1.5, 2, 1.5, (np.e + 2) / (np.e + 1)], rtol=1e-4)
    for x in (1e4, 1e6):
        far = State.of(np.float32([[x], [-x]]), np.float32([[1], [2]]), "exp")
        assert far.query(np.float32([[x], [-x]])).tolist() == [[1], [1]]


def test_a_scale_for_each_feature():
    k, q, v = np.array([[100.0, -100.0]]), np.array([[-100.0, 100.0]]), np.array([[3.0]])
    np.testing.assert_allclose(State.of(k, v, "exp").query(q), [[3.0]], rtol=1e-15)


def test_eps_is_in_true_units():
    k, v = np.full((1, 1), -50.0), np.ones((1, 1))
    state = State.of(k, v, "exp")
    q = np.full((1, 1), 50.0)
    np.testing.assert_allclose(state.query(q, 1.0), [[0.5]])
    assert state.query(-q * 20, 1e-6)[0, 0] == 0
    np.testing.assert_allclose(state.query(q * 20, 1.0), [[1.0]])
    np.testing.assert_allclose(state.query(-q * 20, 0.0), [[1.0]])


def test_signatures_of_sisters():
    query, step = (inspect.signature(f).parameters for f in (State.query, State.step))
    assert list(query) == ["self", "q", "eps", "enable_gqa", "normalize", "out"]
    assert list(step) == ["self", "q", "k", "v", "eps", "enable_gqa", "normalize", "out"]
    for name in ("eps", "enable_gqa", "normalize", "out"):
        assert query[name] == step[name]
    for name in ("state", "order"):
        assert name not in step
