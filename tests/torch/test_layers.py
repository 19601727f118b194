"""`LinearAttention`: parameters and call of nn.MultiheadAttention, and the formula it computes."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from layer_cases import CLOSE, Learned, attention  # noqa: E402
from torch import nn  # noqa: E402

import linattn  # noqa: E402
from linattn import FeatureMap, reference  # noqa: E402
from linattn.torch import LinearAttention  # noqa: E402

Array = Any

E, H = 21, 3  # features and heads: heads of 7
N, L, S = 2, 13, 11


def inputs(
    n_q: int = L, n_k: int | None = None, kdim: int = E, vdim: int = E, seed: int = 0
) -> tuple[Any, Any, Any]:
    made = torch.Generator().manual_seed(seed)
    n_k = n_q if n_k is None else n_k
    return tuple(
        torch.randn(N, n, width, generator=made)
        for n, width in ((n_q, E), (n_k, kdim), (n_k, vdim))
    )


def padding() -> Any:
    """(N, S), True for padding, to the right in one sequence and within the other."""
    mask = torch.zeros(N, S, dtype=torch.bool)
    mask[0, 7:] = True
    mask[1, 2:5] = True
    return mask


def close(found: Any, expected: Array, **bounds: float) -> None:
    np.testing.assert_allclose(found.detach().numpy(), expected, **(bounds or CLOSE))


def moved(x: Any, batch_first: bool) -> Any:
    """(N, L, E) in the layout of batch_first."""
    return x if batch_first else x.transpose(0, 1)


# ---------------------------------------------------------------- what nn.MultiheadAttention has

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"bias": False},
    {"kdim": 5, "vdim": 17},
    {"kdim": 5},
    {"add_bias_kv": True},
    {"dropout": 0.1, "batch_first": True, "dtype": torch.float64},
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_parameters_are_those_of_multihead_attention(options: dict[str, Any]) -> None:
    """Names, order, shapes, dtypes, and for a seed the first values, bit for bit."""
    torch.manual_seed(5)
    theirs = nn.MultiheadAttention(E, H, **options)
    torch.manual_seed(5)
    ours = LinearAttention(E, H, **options)
    expected = theirs.state_dict()
    found = ours.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name
    for layer in (ours, theirs):
        for p in layer.parameters():
            nn.init.normal_(p)
    assert str(ours.load_state_dict(theirs.state_dict())) == "<All keys matched successfully>"
    assert str(theirs.load_state_dict(ours.state_dict())) == "<All keys matched successfully>"


def test_arguments_stand_where_multihead_attention_has_them() -> None:
    import inspect

    for name in ("__init__", "forward"):
        theirs = list(inspect.signature(getattr(nn.MultiheadAttention, name)).parameters)
        ours = inspect.signature(getattr(LinearAttention, name)).parameters
        assert list(ours)[: len(theirs)] == theirs
        assert all(p.kind is p.KEYWORD_ONLY for p in list(ours.values())[len(theirs) :])
    defaults = inspect.signature(LinearAttention.forward).parameters
    assert defaults["need_weights"].default is False


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("options", OPTIONS[:5], ids=str)
def test_definition(options: dict[str, Any], batch_first: bool) -> None:
    layer = LinearAttention(E, H, batch_first=batch_first, **options)
    for p in layer.parameters():
        nn.init.normal_(p, std=0.3)
    q, k, v = inputs(L, S, options.get("kdim", E), options.get("vdim", E))
    out, weights = layer(*(moved(x, batch_first) for x in (q, k, v)))
    assert weights is None
    close(moved(out, batch_first), attention(layer, q, k, v))
    # without a batch
    one, _ = layer(q[1], k[1], v[1])
    assert one.shape == (L, E)
    close(one, attention(layer, q, k, v)[1])


@pytest.mark.parametrize("shared", ["self", "key is value", "none"])
def test_shared_inputs_are_projected_alike(shared: str) -> None:
    layer = LinearAttention(E, H, batch_first=True)
    q, k, v = inputs()
    if shared == "self":
        k = v = q
    elif shared == "key is value":
        v = k
    close(layer(q, k, v)[0], attention(layer, q, k, v))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("causal", [False, True])
def test_grouped_heads(causal: bool, batch_first: bool) -> None:
    layer = LinearAttention(24, 6, num_kv_heads=2, batch_first=batch_first, causal=causal)
    assert layer.in_proj_weight.shape == (24 + 2 * 8, 24)
    x = torch.randn(N, L, 24)
    given = moved(x, batch_first)
    out, state = layer(given, given, given, return_state=True)
    close(moved(out, batch_first), attention(layer, x, x, x, causal=causal))
    assert state.batch_shape == (N, 2)
    wide = LinearAttention(24, 6, num_kv_heads=2, kdim=5, vdim=7, batch_first=True)
    assert [wide.k_proj_weight.shape, wide.v_proj_weight.shape] == [(8, 5), (8, 7)]


# -------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("kind", ["bool", "float", "double"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_padding(batch_first: bool, kind: str) -> None:
    layer = LinearAttention(E, H, batch_first=batch_first)
    q, k, v = inputs(L, S)
    mask = padding()
    expected = attention(layer, q, k, v, keep=~mask)
    k, v = (torch.where(mask[..., None], torch.nan, x) for x in (k, v))
    given = mask
    if kind != "bool":
        given = torch.zeros(mask.shape, dtype=getattr(torch, kind)).masked_fill(mask, -torch.inf)
    call = [moved(x, batch_first) for x in (q, k, v)]
    out, _ = layer(*call, key_padding_mask=given)
    close(moved(out, batch_first), expected)
    one, _ = layer(q[1], k[1], v[1], key_padding_mask=given[1])
    close(one, expected[1])


def test_all_padding_gives_the_output_bias_and_no_gradient() -> None:
    layer = LinearAttention(E, H, batch_first=True)
    nn.init.normal_(layer.out_proj.bias)
    x = inputs()[0].requires_grad_()
    mask = torch.zeros(N, L, dtype=torch.bool)
    mask[1] = True
    out, _ = layer(x, x, x, key_padding_mask=mask)
    assert torch.equal(out[1], layer.out_proj.bias.expand(L, E))
    out[1].sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))


def test_padding_follows_the_convention_of_multihead_attention() -> None:
    """What plays no part there plays no part here."""
    ours, theirs = (
        LinearAttention(E, H, batch_first=True),
        nn.MultiheadAttention(E, H, batch_first=True),
    )
    q, k, v = inputs(L, S)
    mask = padding()
    noise = torch.randn(k.shape) * mask[..., None]
    for layer in (ours, theirs):
        before, _ = layer(q, k, v, key_padding_mask=mask)
        after, _ = layer(q, k + noise, v + noise, key_padding_mask=mask)
        assert torch.equal(before, after)


CAUSAL = torch.ones(L, L, dtype=torch.bool).triu(1)


@pytest.mark.parametrize(
    "call",
    [
        {"is_causal": True},
        {"attn_mask": CAUSAL},
        {"attn_mask": CAUSAL.expand(N * H, L, L)},
        {"attn_mask": nn.Transformer.generate_square_subsequent_mask(L)},
        {"attn_mask": nn.Transformer.generate_square_subsequent_mask(L).double()},
        {"attn_mask": CAUSAL, "is_causal": True},
    ],
    ids=["hint", "bool", "3 axes", "float", "double", "both"],
)
def test_causal_calls(call: dict[str, Any]) -> None:
    layer = LinearAttention(E, H, batch_first=True)
    x = inputs()[0]
    expected = attention(layer, x, x, x, causal=True)
    close(layer(x, x, x, **call)[0], expected)
    layer.causal = True
    close(layer(x, x, x)[0], expected)
    close(layer(x, x, x, **call)[0], expected)


def test_causal_with_padding() -> None:
    layer = LinearAttention(E, H, batch_first=True)
    x = inputs(S)[0]
    out, _ = layer(x, x, x, key_padding_mask=padding(), is_causal=True)
    close(out, attention(layer, x, x, x, keep=~padding(), causal=True))


def test_a_mask_that_blocks_nothing_is_none() -> None:
    layer = LinearAttention(E, H, batch_first=True)
    q, k, v = inputs(L, S)
    for mask in (torch.zeros(L, S), torch.zeros(L, S, dtype=torch.bool)):
        assert torch.equal(layer(q, k, v, attn_mask=mask)[0], layer(q, k, v)[0])


def test_refused() -> None:
    layer = LinearAttention(E, H, batch_first=True)
    q, k, v = inputs()

    def refuses(error: type[Exception], text: str, *args: Any, **call: Any) -> None:
        with pytest.raises(error) as caught:
            layer(*(args or (q, k, v)), **call)
        for part in text.split("..."):
            assert part in str(caught.value), str(caught.value)

    refuses(ValueError, "need_weights: expected False...nn.MultiheadAttention", need_weights=True)
    band = CAUSAL | CAUSAL.T.roll(1, 0)
    refuses(
        ValueError, "attn_mask: expected None or a causal mask...is_causal=True", attn_mask=band
    )
    slope = torch.full((L, L), -0.5)
    refuses(ValueError, "attn_mask: expected None or a causal mask", attn_mask=slope)
    future = CAUSAL.T
    refuses(ValueError, "attn_mask: expected None or a causal mask", attn_mask=future)
    refuses(TypeError, "attn_mask: expected a boolean...got torch.int64", attn_mask=CAUSAL.long())
    refuses(
        ValueError, "attn_mask: expected shape (13, 13)...got (13, 11)", attn_mask=CAUSAL[:, :S]
    )
    mask = torch.zeros(N, L)
    refuses(TypeError, "key_padding_mask...got torch.uint8...bool()", key_padding_mask=mask.byte())
    refuses(ValueError, "key_padding_mask: expected only 0 and -inf", key_padding_mask=mask - 1e9)
    refuses(ValueError, "expected shape (2, 13)...got (13, 2)", key_padding_mask=mask.T)
    refuses(ValueError, "query: expected (N, L, E)...got shape (1, 2, 13, 21)", q[None], k, v)
    refuses(ValueError, "key: expected (N, L, E)...alike", q, k[0], v[0])
    refuses(ValueError, "key: expected 21 features...(2, 13, 20)", q, k[..., 1:], v)
    refuses(ValueError, "value: expected key's shape...(2, 13)...(2, 12)", q, k, v[:, 1:])
    refuses(ValueError, "key: expected query's batch of 2 on axis 0", q, k[:1], v[:1])
    with pytest.raises(ValueError, match="state"):
        layer(q, k[:, 1:], v[:, 1:], is_causal=True)
    with pytest.raises(TypeError, match="unexpected keyword"):
        layer(q, k, v, is_casual=True)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_heads": 4}, "embed_dim: expected a multiple of num_heads = 4, got 21"),
        ({"num_heads": 0}, "num_heads: expected at least 1, got 0"),
        ({"num_kv_heads": 2}, "num_kv_heads: expected a divisor of num_heads = 3, got 2"),
        ({"add_zero_attn": True}, "add_zero_attn: expected False.*add_bias_kv"),
        ({"dropout": 1.5}, "dropout: expected a probability, got 1.5"),
        ({"eps": -1.0}, "eps: expected a number >= 0 or None, got -1.0"),
        ({"feature_map": "gelu"}, "feature_map: expected one of 'elu1'.*got 'gelu'"),
    ],
    ids=str,
)
def test_refused_by_the_constructor(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LinearAttention(**{"embed_dim": E, "num_heads": H, **options})


# ------------------------------------------------------------------------------------- dropout


def test_dropout_leaves_out_keys_in_training_alone() -> None:
    layer = LinearAttention(E, H, dropout=0.4, batch_first=True)
    x = inputs()[0]
    layer.eval()
    assert torch.equal(layer(x, x, x)[0], layer(x, x, x)[0])
    close(layer(x, x, x)[0], attention(layer, x, x, x))
    layer.train()
    torch.manual_seed(3)
    first = layer(x, x, x)[0]
    assert not torch.equal(first, layer(x, x, x)[0])
    torch.manual_seed(3)
    assert torch.equal(first, layer(x, x, x)[0])


def test_dropout_means_keys_left_out_for_all_queries() -> None:
    """One head, one sequence: some subset of keys explains the output of every query."""
    layer = LinearAttention(7, 1, dropout=0.5, batch_first=True)
    x = torch.randn(1, 5, 7)
    out = layer(x, x, x)[0].detach().numpy()
    subsets = (np.array([[n >> j & 1 for j in range(5)]], bool) for n in range(32))
    matches = [
        keep for keep in subsets if np.allclose(out, attention(layer, x, x, x, keep=keep), **CLOSE)
    ]
    assert len(matches) == 1


# ------------------------------------------------------------------------- states and decoding


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}, {"feature_map": "exp"}], ids=str)
@pytest.mark.parametrize("batch_first", [True, False])
def test_prefill_and_steps_are_one_pass(batch_first: bool, options: dict[str, Any]) -> None:
    layer = LinearAttention(E, H, batch_first=batch_first, causal=True, **options).eval()
    at = 1 if batch_first else 0
    x = moved(inputs(43)[0], batch_first)
    with torch.no_grad():
        whole, nothing = layer(x, x, x)
        assert nothing is None
        a, b, rest = x.split([37, 5, 1], dim=at)
        outs = [None, None]
        outs[0], state = layer(a, a, a, return_state=True)
        before = state.copy()
        outs[1], longer = layer(b, b, b, state=state, return_state=True)
        assert torch.equal(state.kv, before.kv)  # what is given is not changed
        outs.append(layer.step(rest, longer))
        torch.testing.assert_close(torch.cat(outs, dim=at), whole, **CLOSE)

        state = layer.zero_state(N)
        outs = [layer.step(x_t, state) for x_t in x.split(1, dim=at)]
        torch.testing.assert_close(torch.cat(outs, dim=at), whole, **CLOSE)

        # without a batch
        one = x.select(1 - at, 1)
        state = layer.zero_state()
        outs = [layer.step(x_t, state) for x_t in one.split(1)]
        torch.testing.assert_close(torch.cat(outs), whole.select(1 - at, 1), **CLOSE)


def test_branches() -> None:
    """Two continuations of one prompt, the branches taken by indexing."""
    layer = LinearAttention(E, H, batch_first=True, causal=True)
    x = inputs(7)[0]
    steps = torch.randn(3, 1, E)
    with torch.no_grad():
        _, state = layer(x, x, x, return_state=True)
        beams = state[[0, 0, 1]]
        out = layer.step(steps, beams)
        for beam, source in enumerate([0, 0, 1]):
            line = torch.cat([x[source], steps[beam]])
            expected = layer(line, line, line)[0][-1:]
            torch.testing.assert_close(out[beam], expected, **CLOSE)


def test_gradients_through_a_state() -> None:
    layer = LinearAttention(E, H, batch_first=True, causal=True, add_bias_kv=True)
    x = inputs(17)[0]
    layer(x, x, x)[0].square().sum().backward()
    expected = {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad()
    a, b = x[:, :11], x[:, 11:]
    first, state = layer(a, a, a, return_state=True)
    second, _ = layer(b, b, b, state=state)
    (first.square().sum() + second.square().sum()).backward()
    for name, p in layer.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-3, atol=1e-3, msg=name)
        assert p.grad.abs().max() > 0, name


def test_a_step_refuses_where_a_gradient_is_needed() -> None:
    layer = LinearAttention(E, H, batch_first=True)
    state = layer.zero_state(N)
    with pytest.raises(RuntimeError, match="no_grad"):
        layer.step(torch.randn(N, 1, E), state)
    with torch.no_grad(), pytest.raises(ValueError, match="x_t: expected one position, axis 1"):
        layer.step(torch.randn(N, 2, E), state)


# ---------------------------------------------------------------------------- feature maps


def test_a_module_as_feature_map_belongs_to_the_layer() -> None:
    layer = LinearAttention(E, H, batch_first=True, causal=True, feature_map=Learned(7, 19))
    assert [n for n, _ in layer.named_parameters() if n.startswith("feature_map.")] == [
        "feature_map.linear.weight",
        "feature_map.linear.bias",
    ]
    x = inputs()[0]
    out, state = layer(x, x, x, return_state=True)
    assert state.D == 19
    out.square().sum().backward()
    for name, p in layer.named_parameters():
        assert p.grad is not None and p.grad.abs().max() > 0, name

    saved = io.BytesIO()
    torch.save(layer.state_dict(), saved)
    saved.seek(0)
    other = LinearAttention(E, H, batch_first=True, causal=True, feature_map=Learned(7, 19))
    other.load_state_dict(torch.load(saved, weights_only=True))
    assert torch.equal(other(x, x, x)[0], out)

    assert {p.dtype for p in copy.deepcopy(layer).double().parameters()} == {torch.float64}
    assert copy.deepcopy(layer).to("meta").feature_map.linear.weight.device.type == "meta"
    with torch.no_grad():
        steps, state = [], layer.zero_state(N)
        for x_t in x.split(1, dim=1):
            steps.append(layer.step(x_t, state))
    torch.testing.assert_close(torch.cat(steps, dim=1), out.detach(), **CLOSE)


def test_a_module_within_a_feature_map_belongs_to_the_layer() -> None:
    """Its last step stays fused; copies use their own weights."""
    project = nn.Linear(7, 5)
    layer = LinearAttention(
        E, H, batch_first=True, feature_map=FeatureMap("learned", "exp", project, eps=0.0)
    )
    x = inputs()[0]
    expected = LinearAttention(
        E, H, batch_first=True, feature_map=lambda x: project(x).exp(), eps=0
    )
    expected.load_state_dict(layer.state_dict(), strict=False)
    torch.testing.assert_close(layer(x, x, x)[0], expected(x, x, x)[0], **CLOSE)
    assert "feature_map_project.weight" in layer.state_dict()
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        project.weight.zero_()
    torch.testing.assert_close(twin(x, x, x)[0], expected_before(twin, x), **CLOSE)
    assert not torch.allclose(twin(x, x, x)[0], layer(x, x, x)[0], **CLOSE)
    twin.feature_map_project = nn.Linear(7, 11)  # exchanged, as adapters do
    assert twin(x, x, x, return_state=True)[1].D == 11


def expected_before(layer: Any, x: Any) -> Any:
    """The output of a layer computed with its registered projection, unfused."""
    own = layer.feature_map_project
    plain = LinearAttention(E, H, batch_first=True, feature_map=lambda x: own(x).exp(), eps=0)
    plain.load_state_dict(layer.state_dict(), strict=False)
    return plain(x, x, x)[0]


@pytest.mark.parametrize("name", ["elu1", "relu", "squared_relu", "softplus", "sigmoid", "exp"])
def test_named_maps(name: str) -> None:
    layer = LinearAttention(E, H, batch_first=True, feature_map=name)
    q, k, v = inputs(L, S)
    d = layer.head_dim
    parts = nn.functional.linear(torch.stack([q[0, :1], k[0, :1], v[0, :1]]), layer.in_proj_weight)
    heads = [
        np.asarray(p[0, i * E : i * E + d].detach().double())[None] for i, p in enumerate(parts)
    ]
    found = linattn.linear_attention(*(torch.tensor(x) for x in heads), name)
    np.testing.assert_allclose(found, reference.double_sum(*heads, name), rtol=1e-9)
    assert layer(q, k, v)[0].shape == (N, L, E)
    assert f"feature_map={name!r}" in repr(layer)


# --------------------------------------------------------------------------- nested tensors


@pytest.mark.parametrize("layout", ["strided", "jagged"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors(causal: bool, layout: str) -> None:
    layer = LinearAttention(E, H, batch_first=True, causal=causal)
    lengths = [5, 1, 11]
    parts = [torch.randn(n, E) for n in lengths]
    x = torch.nested.as_nested_tensor(parts, layout=getattr(torch, layout))
    out, _ = layer(x, x, x)
    assert out.is_nested and out.layout == x.layout
    for part, found in zip(parts, out.unbind(), strict=True):
        close(found, attention(layer, *([part[None]] * 3), causal=causal)[0])
    (x + out).unbind()  # the residual connection: their raggedness is one
    keys = torch.nested.as_nested_tensor([p.clone() for p in parts], layout=x.layout)
    torch.testing.assert_close(layer(x, keys, keys)[0].unbind()[2], out.unbind()[2], **CLOSE)
    for part, value in (("key_padding_mask", torch.zeros(3, 11)), ("attn_mask", CAUSAL)):
        with pytest.raises(ValueError, match=part):
            layer(x, x, x, **{part: value})
    with pytest.raises(ValueError, match="all of them nested or none"):
        layer(x, torch.zeros(3, 11, E), torch.zeros(3, 11, E))


# ------------------------------------------------------------------- dtypes, devices, compilers


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype: str) -> None:
    layer = LinearAttention(E, H, batch_first=True, causal=True, dtype=getattr(torch, dtype))
    x = inputs()[0].to(getattr(torch, dtype))
    out, _ = layer(x, x, x)
    assert out.dtype == x.dtype
    close(out.float(), attention(layer, x, x, x, causal=True), rtol=0.05, atol=0.05)
    out.sum().backward()
    assert layer.in_proj_weight.grad.isfinite().all()


def test_autocast() -> None:
    layer = LinearAttention(E, H, batch_first=True)
    x = inputs()[0]
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = layer(x, x, x)
    close(out.float(), attention(layer, x, x, x), rtol=0.05, atol=0.05)


def test_meta() -> None:
    layer = LinearAttention(E, H, batch_first=True, device="meta")
    x = torch.empty(N, L, E, device="meta")
    out, _ = layer(x, x, x, is_causal=True)
    assert (out.device.type, out.shape) == ("meta", x.shape)


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
def test_compiled(padded: bool) -> None:
    layer = LinearAttention(E, H, batch_first=True, causal=True)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for n in (13, 29):
        x = torch.randn(N, n, E)
        mask = None
        if padded:
            mask = torch.zeros(N, n).masked_fill(torch.arange(n) > 7, -torch.inf)
        out, _ = compiled(x, x, x, key_padding_mask=mask)
        torch.testing.assert_close(out, layer(x, x, x, key_padding_mask=mask)[0], **CLOSE)
    if padded:
        with pytest.raises(RuntimeError, match="key_padding_mask: expected only 0 and -inf"):
            compiled(x, x, x, key_padding_mask=mask - 1)


@pytest.mark.slow
def test_exported() -> None:
    layer = LinearAttention(E, H, batch_first=True, causal=True).eval()
    x = torch.randn(N, L, E)
    n = torch.export.Dim("n", min=2, max=1000)
    program = torch.export.export(
        layer, (x, x, x), dynamic_shapes={name: {1: n} for name in ("query", "key", "value")}
    )
    y = torch.randn(N, 57, E)
    torch.testing.assert_close(program.module()(y, y, y)[0], layer(y, y, y)[0], **CLOSE)
