"""What an error says: the argument, what was expected, what came, what to do."""

import ml_dtypes
import numpy as np
import pytest

from linattn import State, _check, linear_attention, softmax_attention

B, H, N, M, D, E = 2, 3, 11, 7, 5, 13  # batch, heads, keys, queries, d_k, d_v

pytestmark = pytest.mark.usefixtures("either_backend")  # the same errors, whoever computes


def arrays(**changed):
    shapes = {"q": (B, H, M, D), "k": (B, H, N, D), "v": (B, H, N, E)}
    made = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    return made | changed


def refused(kind, parts, call, *args, **kwargs):
    with pytest.raises(kind) as error:
        call(*args, **kwargs)
    message = str(error.value)
    for part in parts:
        assert part in message, message
    assert type(error.value) is kind
    return message


# (changed arguments, exception, parts of the message)
CASES = {
    "features of q and k": (
        {"q": np.ones((B, H, M, D + 1))},
        ValueError,
        ["q: expected", "(2, 3, 7, 6)", "(2, 3, 11, 5)", "6 and 5"],
    ),
    "rows of v": (
        {"v": np.ones((B, H, N + 1, E))},
        ValueError,
        ["v: expected one row for each key", "11 and 12 positions"],
    ),
    "a single row": ({"q": np.ones(D)}, ValueError, ["q: expected", "(5,)", "q[None, :]"]),
    "no features": (
        {"v": np.ones((B, H, N, 0))},
        ValueError,
        ["v: expected at least one feature", "(2, 3, 11, 0)"],
    ),
    "batch": (
        {"v": np.ones((B + 2, H, N, E))},
        ValueError,
        ["k (2, 3)", "v (4, 3)", "axis -2", "2 in k", "4 in v"],
    ),
    "heads": (
        {"q": np.ones((B, 2 * H, M, D))},
        ValueError,
        ["axis -1", "6 in q", "3 in k", "enable_gqa=True"],
    ),
    "integers": (
        {"k": np.ones((B, H, N, D), np.int64)},
        TypeError,
        ["k: expected dtype float16, bfloat16, float32 or float64", "int64", "k.astype("],
    ),
    "booleans": ({"q": np.ones((M, D), bool)}, TypeError, ["q: ", "bool", ".astype("]),
    "complex": ({"v": np.ones((N, E), complex)}, TypeError, ["v: ", "complex128", ".astype("]),
    "longdouble": (
        {"q": np.ones((M, D), np.longdouble)},
        TypeError,
        ["q: ", "q.astype(numpy.float64)"],
    ),
    "float8": (
        {"q": np.ones((M, D), ml_dtypes.float8_e4m3fn)},
        TypeError,
        ["q: ", "float8_e4m3fn", ".astype("],
    ),
    "objects": ({"q": np.full((M, D), None)}, TypeError, ["q: ", "object"]),
    "strings": ({"q": "abc"}, TypeError, ["q: ", "<U3"]),
    "ragged": ({"q": [[1.0], [1.0, 2.0]]}, TypeError, ["q: expected an array", "list"]),
    "masked array": (
        {"k": np.ma.ones((B, H, N, D))},
        TypeError,
        ["k: ", "MaskedArray", "k.data", "key_mask"],
    ),
    "integer lists": ({"q": [[1, 2, 3, 4, 5]]}, TypeError, ["q: ", "int64", ".astype("]),
    "causal": (
        {"causal": True},
        ValueError,
        ["causal: ", "n_q = 7", "n_k = 11", "pass the earlier keys as a state"],
    ),
    "mask of 0 and 1": (
        {"key_mask": np.ones(N, np.uint8)},
        TypeError,
        ["key_mask: expected a boolean array", "uint8", "key_mask.astype(bool)"],
    ),
    "mask of floats": (
        {"key_mask": np.ones(N)},
        TypeError,
        ["key_mask: ", "float64", "key_mask != 0", "key_mask == 0"],
    ),
    "mask (B, n_k)": (
        {"key_mask": np.ones((B, N), bool)},
        ValueError,
        ["key_mask: ", "(n_k,) = (11,)", "(2, 3, 11)", "got (2, 11)", "pass key_mask[:, None]"],
    ),
    "mask (H, n_k)": (
        {"key_mask": np.ones((H, N), bool)},
        ValueError,
        ["got (3, 11)", "pass key_mask[None]"],
    ),
    "mask of other length": (
        {"key_mask": np.ones(N + 1, bool)},
        ValueError,
        ["got (12,)", "one entry for each of 11 keys"],
    ),
    "mask (B, H, n_k, 1)": (
        {"key_mask": np.ones((B, H, N, 1), bool)},
        ValueError,
        ["got (2, 3, 11, 1)", "pass key_mask[..., 0]"],
    ),
    "mask of pairs": (
        {"key_mask": np.ones((B, H, N, N), bool)},
        ValueError,
        ["got (2, 3, 11, 11)", "pairs", "causal=True"],
    ),
    "mask of another batch": (
        {"key_mask": np.ones((B + 2, H, N), bool)},
        ValueError,
        ["got (4, 3, 11)", "k's leading axes"],
    ),
    "mask no array": ({"key_mask": "left"}, TypeError, ["key_mask: ", "<U4"]),
    "eps below 0": ({"eps": -1e-6}, ValueError, ["eps: ", ">= 0", "-1e-06"]),
    "eps NaN": ({"eps": float("nan")}, ValueError, ["eps: ", "nan"]),
    "eps infinite": ({"eps": float("inf")}, ValueError, ["eps: ", "inf"]),
    "eps array": ({"eps": np.ones(3)}, TypeError, ["eps: expected a number", "(3,)"]),
    "eps True": ({"eps": True}, TypeError, ["eps: expected a number", "bool"]),
    "order": (
        {"order": "cubic"},
        ValueError,
        ["order: expected one of 'auto', 'linear' or 'quadratic', got 'cubic'"],
    ),
    "order with return_state": (
        {"order": "quadratic", "return_state": True},
        ValueError,
        ["order: ", "return_state=True", "got 'quadratic'", "order='auto'"],
    ),
    "flag": ({"causal": "yes"}, TypeError, ["causal: expected True or False, got str 'yes'"]),
    "flag 1": ({"normalize": 1}, TypeError, ["normalize: expected True or False, got int 1"]),
    "state": ({"state": (1, 2)}, TypeError, ["state: expected a State or None, got tuple"]),
    "unknown map": ({"feature_map": "elu"}, ValueError, ["feature_map: ", "'elu1'", "'elu'"]),
    "map no map": ({"feature_map": 2}, TypeError, ["feature_map: ", "int"]),
    "map loses rows": (
        {"feature_map": lambda x: x[..., 1:, :]},
        ValueError,
        ["feature_map(k): ", "(2, 3, 11, 'D')", "row by row", "(2, 3, 10, 5)"],
    ),
    "map gives integers": (
        {"feature_map": lambda x: x > 0},
        TypeError,
        ["feature_map(k): ", "bool", ".astype("],
    ),
    "map gives no array": (
        {"feature_map": lambda x: 1.0},
        TypeError,
        ["feature_map(k): ", "float"],
    ),
    "map of two widths": (
        {"feature_map": lambda x: x if x.shape[-2] == N else x[..., 1:]},
        ValueError,
        ["feature_map(q): expected 5 features", "got 4"],
    ),
    "gqa": (
        {"enable_gqa": True, "q": np.ones((B, 4, M, D))},
        ValueError,
        ["enable_gqa: ", "multiple of key heads", "got 4 and 3", "third axis from the end"],
    ),
    "gqa without heads": (
        {"enable_gqa": True, "q": np.ones((M, D))},
        ValueError,
        ["enable_gqa: ", "(7, 5)", "q[None]"],
    ),
    "cu_seqlens of unequal lengths": (
        {"cu_seqlens": [0, N]},
        ValueError,
        ["cu_seqlens: ", "n_q = 7", "n_k = 11"],
    ),
    "out shape": (
        {"out": np.ones((B, H, M, D), np.float32)},
        ValueError,
        ["out: expected shape (2, 3, 7, 13), got (2, 3, 7, 5)", "numpy.empty("],
    ),
    "out dtype": (
        {"out": np.ones((B, H, M, E))},
        TypeError,
        ["out: expected dtype float32, got float64", "numpy.float32"],
    ),
    "out no array": ({"out": [0.0]}, TypeError, ["out: expected a numpy array, got list"]),
}


@pytest.mark.parametrize("case", CASES)
def test_linear_attention(case):
    changed, kind, parts = CASES[case]
    before = {n: x.copy() for n, x in arrays().items()}
    given = arrays(**changed)
    message = refused(kind, parts, linear_attention, **given)
    assert ": expected" in message or case in ("order with return_state", "complex")
    for name, value in before.items():
        if name not in changed:
            assert (given[name] == value).all()


@pytest.mark.parametrize(
    ("cuts", "kind", "parts"),
    [
        ([0, 3, 9], ValueError, ["run from 0 to the 11 positions", "0 to 9", "numpy.cumsum"]),
        ([1, 3, 11], ValueError, ["run from 0", "1 to 11"]),
        ([0, 7, 3, 11], ValueError, ["no entry less than the one before", "7 then 3 at index 2"]),
        ([0.0, 11.0], TypeError, ["integers", "float64", "numpy.cumsum([0, *lengths])"]),
        ([[0, 11]], ValueError, ["integers", "(1, 2)"]),
        ([], TypeError, ["cu_seqlens: ", "(0,)"]),
    ],
)
def test_cu_seqlens(cuts, kind, parts):
    x = np.ones((N, D))
    refused(kind, ["cu_seqlens: expected", *parts], linear_attention, x, x, x, cu_seqlens=cuts)


def test_overlap_of_out():
    x = np.ones((2 * N, D))
    q, k, v = x[:N], np.ones((N, D)), np.ones((N, D))
    refused(
        ValueError,
        ["out: expected memory of its own", "shared with q", "copy of q"],
        linear_attention,
        q,
        k,
        v,
        out=x[1 : N + 1],
    )
    refused(ValueError, ["shared with v"], linear_attention, q, k, v, out=v)
    refused(ValueError, ["shared with k"], softmax_attention, q, k, v, out=k)
    refused(ValueError, ["read-only"], linear_attention, q, k, v, out=_frozen(np.ones((N, D))))
    spread = np.lib.stride_tricks.as_strided(np.ones(D), (N, D), (0, 8))
    refused(ValueError, ["broadcast view"], linear_attention, q, k, v, out=spread)
    # Interleaved with an input, yet provably apart from it
    both = np.ones((N, 2, D))
    out = linear_attention(both[:, 0], k, v, out=both[:, 1])
    assert np.shares_memory(out, both)


def _frozen(x):
    x.flags.writeable = False
    return x


def test_states_that_do_not_fit():
    given = arrays(q=np.ones((B, H, N, D), np.float32))
    other = State.zeros((B, H), D, E, "relu")
    refused(ValueError, ["state: ", "'elu1'", "'relu'"], linear_attention, **given, state=other)
    narrow = State.zeros((B, H), D, E + 1)
    refused(ValueError, ["d_v = 14", "got 13"], linear_attention, **given, state=narrow)
    thin = State.zeros((B, H), D + 1, E)
    refused(ValueError, ["state: ", "D = 5", "D = 6"], linear_attention, **given, state=thin)
    batch = State.zeros((B, H + 1), D, E)
    refused(ValueError, ["axis -1", "4 in state"], linear_attention, **given, state=batch)
    right = State.zeros((B, H), D, E)
    refused(
        ValueError,
        ["order: ", "state="],
        linear_attention,
        **given,
        state=right,
        order="quadratic",
    )
    refused(
        ValueError,
        ["state: expected a leading axis of 3 sequences", "(2, 3)"],
        linear_attention,
        **given,
        state=right,
        cu_seqlens=[0, 4, 4, N],
    )


def test_state_methods():
    state = State.zeros((B, H), D, E)
    k, v = np.ones((B, H, N, D)), np.ones((B, H, N, E))
    refused(ValueError, ["v: ", "d_v = 13", "got 5"], state.absorb, k, k)
    refused(ValueError, ["D = 6", "D = 5"], state.absorb, np.ones((N, D + 1)), v)
    refused(
        ValueError,
        ["cannot grow in place", "(2, 3)", "(7, 2, 3)", "merge it with State.of(k, v)"],
        state.absorb,
        np.ones((7, B, H, N, D)),
        v,
    )
    refused(ValueError, ["pass key_mask[:, None]"], state.absorb, k, v, np.ones((B, N), bool))
    refused(ValueError, ["axis -1", "4 in q", "3 in state"], state.query, np.ones((B, 4, N, D)))
    refused(ValueError, ["eps: "], state.query, k, -1.0)
    refused(
        ValueError,
        ["q: expected one position", "(2, 3, 11, 5)", "causal=True, state=state"],
        state.step,
        k,
        k[..., :1, :],
        v[..., :1, :],
    )
    refused(ValueError, ["k: expected one position"], state.step, k[..., :1, :], k, v)
    refused(TypeError, ["q: ", "int64"], state.step, np.ones((1, D), int), k, v)
    assert (state.kv == 0).all()
    assert (state.k_sum == 0).all()
    refused(TypeError, ["other: expected a State, got int"], state.merge, 1)
    refused(ValueError, ["merge: ", "'elu1'", "'exp'"], state.merge, State.zeros((), D, E, "exp"))
    refused(ValueError, ["merge: ", "d_v = 13", "d_v = 5"], state.merge, State.zeros((), D, D))
    refused(ValueError, ["axis -1", "7 in other"], state.merge, State.zeros(7, D, E))
    with pytest.raises(IndexError):
        state[5]
    with pytest.raises(TypeError):
        state + 1


def test_state_makers():
    refused(ValueError, ["D: expected at least 1, got 0"], State.zeros, (), 0, 1)
    refused(TypeError, ["d_v: expected an integer"], State.zeros, (), 1, 1.5)
    refused(ValueError, ["batch_shape: expected at least 0"], State.zeros, (-1,), 1, 1)
    refused(TypeError, ["batch_shape: expected a tuple"], State.zeros, 1.5, 1, 1)
    refused(TypeError, ["dtype: ", "int64"], State.zeros, (), 1, 1, dtype=int)
    refused(TypeError, ["dtype: ", "'nothing'"], State.zeros, (), 1, 1, dtype="nothing")
    refused(ValueError, ["kv: ", "(3,)"], State.from_arrays, np.ones(3), np.ones(3))
    refused(
        ValueError,
        ["k_sum: expected shape (3, 5)", "got (3,)"],
        State.from_arrays,
        np.ones((3, 5, 7)),
        np.ones(3),
    )
    sums = np.ones((3, 5)), np.ones(3)
    refused(ValueError, ["log_scale: ", "feature_map"], State.from_arrays, *sums, np.ones(3, int))
    exp = {"feature_map": "exp"}
    refused(TypeError, ["log_scale: ", "float64"], State.from_arrays, *sums, np.ones(3), **exp)
    refused(ValueError, ["log_scale: ", "(5,)"], State.from_arrays, *sums, np.ones(5, int), **exp)


def test_softmax_attention():
    given = arrays()
    refused(ValueError, ["causal: ", "causal=False"], softmax_attention, **given, causal=True)
    refused(TypeError, ["scale: ", "str"], softmax_attention, **given, scale="d")
    refused(ValueError, ["scale: ", "inf"], softmax_attention, **given, scale=float("inf"))
    refused(ValueError, ["key_mask[:, None]"], softmax_attention, **given, key_mask=_mask((B, N)))


def _mask(shape):
    return np.ones(shape, bool)


@pytest.mark.parametrize("call", [linear_attention, softmax_attention])
def test_unknown_arguments(call):
    with pytest.raises(TypeError, match="attn_mask"):
        call(**arrays(), attn_mask=None)


def test_promotion():
    half, brain, single, double = (
        np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
    )
    for a, b, both in [
        (half, half, half),
        (half, brain, single),
        (brain, half, single),
        (brain, single, single),
        (half, double, double),
        (single, double, double),
    ]:
        assert _check.promoted(a, b) == _check.promoted(b, a) == both
    assert _check.promoted(half, brain, brain) == single
