"""`linearize_`: whose formula runs in a swapped model, and what of the old layers stays."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from layer_cases import CLOSE, Learned, attention  # noqa: E402
from torch import nn  # noqa: E402

from linattn.torch import LinearAttention, linearize_  # noqa: E402

Array = Any

E, H, F = 12, 2, 31  # an even number of heads: the fast path takes no other
N, L, S = 3, 13, 11
CAUSAL = torch.ones(L, L, dtype=torch.bool).triu(1)

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")


def encoder_layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(E, H, F, dropout=0.0, batch_first=True, **options)


def padding(n: int) -> Any:
    """(N, n), padding to the right, which nested tensors are made of."""
    lengths = torch.tensor([n, 1, n // 2])
    return torch.arange(n) >= lengths[:, None]


def encoded(layer: Any, x: Any, keep: Array | None = None, causal: bool = False) -> Any:
    """What an encoder layer with linear attention has to give, layer norm after each sum."""
    out = torch.tensor(attention(layer.self_attn, x, x, x, keep, causal), dtype=x.dtype)
    x = layer.norm1(x + out)
    return layer.norm2(x + layer.linear2(layer.activation(layer.linear1(x))))


MODES = ["train", "eval", "eval without gradients", "inference mode"]


@contextlib.contextmanager
def mode(model: Any, name: str) -> Iterator[None]:
    """A model in training, or in evaluation with ever fewer gradients."""
    model.train(name == "train")
    with torch.inference_mode(name == "inference mode"), torch.set_grad_enabled(name in MODES[:2]):
        yield


def test_the_fast_path_is_there_to_be_feared() -> None:
    """With softmax layers forward isn't called in evaluation: else the tests below show nothing."""
    layer = encoder_layer().eval()
    called = []
    layer.self_attn.forward = lambda *args, **call: called.append(args)  # type: ignore[method-assign]
    with torch.no_grad():
        layer(torch.randn(N, L, E))
    assert not called


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("call", ["plain", "padding", "causal", "both"])
def test_encoder_layer(call: str, name: str) -> None:
    layer = linearize_(encoder_layer())
    x = torch.randn(N, L, E)
    mask = padding(L) if call in ("padding", "both") else None
    causal = {"src_mask": CAUSAL, "is_causal": True} if call in ("causal", "both") else {}
    with mode(layer, name):
        out = layer(x, src_key_padding_mask=mask, **causal)
        expected = encoded(layer, x, None if mask is None else ~mask, bool(causal))
        torch.testing.assert_close(out, expected, **CLOSE)


@pytest.mark.parametrize("options", [{"norm_first": True}, {"bias": False}, {}], ids=str)
def test_encoder_layer_is_the_same_in_training_and_evaluation(options: dict[str, Any]) -> None:
    layer = linearize_(encoder_layer(**options))
    x = torch.randn(N, L, E)
    outs = []
    for name in MODES:
        with mode(layer, name):
            outs.append(layer(x))
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], **CLOSE)


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("when", ["before the stack", "after"])
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but")
def test_encoder(nested: bool, when: str, name: str) -> None:
    layer = encoder_layer()
    if when == "before the stack":
        linearize_(layer)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
    if when == "after":
        linearize_(model)
        assert model.use_nested_tensor == nested  # and so nested tensors come to our layer
    x, mask = torch.randn(N, L, E), padding(L)
    keep = ~mask
    with mode(model, name):
        out = model(x, src_key_padding_mask=mask)
        expected = x
        for layer in model.layers:
            expected = encoded(layer, expected, keep)
        torch.testing.assert_close(out[keep], expected[keep], **CLOSE)


@pytest.mark.parametrize("name", MODES)
def test_encoder_with_a_causal_mask_that_it_detects(name: str) -> None:
    model = linearize_(nn.TransformerEncoder(encoder_layer(), 2))
    x = torch.randn(N, L, E)
    with mode(model, name):
        expected = x
        for layer in model.layers:
            expected = encoded(layer, expected, causal=True)
        for mask in (CAUSAL, nn.Transformer.generate_square_subsequent_mask(L)):
            torch.testing.assert_close(model(x, mask=mask), expected, **CLOSE)


@pytest.mark.parametrize("name", MODES)
def test_decoder_layer(name: str) -> None:
    layer = linearize_(nn.TransformerDecoderLayer(E, H, F, dropout=0.0, batch_first=True))
    x, memory = torch.randn(N, L, E), torch.randn(N, S, E)
    mask = padding(S)
    with mode(layer, name):
        out = layer(x, memory, tgt_mask=CAUSAL, memory_key_padding_mask=mask)
        own = torch.tensor(attention(layer.self_attn, x, x, x, causal=True), dtype=x.dtype)
        y = layer.norm1(x + own)
        cross = attention(layer.multihead_attn, y, memory, memory, keep=~mask)
        y = layer.norm2(y + torch.tensor(cross, dtype=x.dtype))
        y = layer.norm3(y + layer.linear2(layer.activation(layer.linear1(y))))
        torch.testing.assert_close(out, y, **CLOSE)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True, but")
def test_a_whole_transformer_trains(batch_first: bool) -> None:
    model = nn.Transformer(E, H, 1, 1, F, dropout=0.1, batch_first=batch_first)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)  # made before the swap
    linearize_(model)
    x, y = torch.randn(N, S, E), torch.randn(N, L, E)
    if not batch_first:
        x, y = x.transpose(0, 1), y.transpose(0, 1)
    before = copy.deepcopy(model.state_dict())
    out = model(x, y, tgt_is_causal=True, tgt_mask=CAUSAL)
    assert out.shape == y.shape
    out.square().sum().backward()
    optimizer.step()
    after = model.state_dict()
    assert list(after) == list(before)
    changed = {n for n in after if not torch.equal(after[n], before[n])}
    assert {n for n in after if "in_proj" in n or "out_proj" in n} <= changed


# -------------------------------------------------------------------------- what of them stays


def test_parameters_are_the_same_objects() -> None:
    for options in ({}, {"bias": False}, {"kdim": 5, "vdim": 7}, {"add_bias_kv": True}):
        old = nn.MultiheadAttention(E, H, batch_first=True, dropout=0.25, **options)
        model = linearize_(nn.ModuleDict({"attention": old}))
        new = model["attention"]
        assert type(new) is LinearAttention
        assert dict(new.named_parameters()).keys() == dict(old.named_parameters()).keys()
        for name, p in old.named_parameters():
            assert dict(new.named_parameters())[name] is p
        for name in ("embed_dim", "num_heads", "kdim", "vdim", "batch_first", "dropout"):
            assert getattr(new, name) == getattr(old, name)
        q, k, v = torch.randn(N, L, E), torch.randn(N, S, new.kdim), torch.randn(N, S, new.vdim)
        new.eval()
        np.testing.assert_allclose(new(q, k, v)[0].detach(), attention(new, q, k, v), **CLOSE)


def test_flags_hooks_device_and_dtype_stay() -> None:
    model = nn.ModuleList([nn.MultiheadAttention(E, H, batch_first=True) for _ in range(3)])
    model[0].eval().requires_grad_(False)
    model[0].label = "first"
    model[1].double()
    model[2].to("meta")
    seen: list[str] = []
    handles = [
        model[1].register_forward_pre_hook(lambda *_: seen.append("before")),
        model[1].register_forward_hook(lambda *_: seen.append("after")),
        model[1].out_proj.register_forward_hook(lambda *_: seen.append("projection")),
    ]
    linearize_(model)
    assert [type(m) for m in model] == [LinearAttention] * 3
    assert not model[0].training and model[1].training
    assert not any(p.requires_grad for p in model[0].parameters())
    assert all(p.requires_grad for p in model[1].parameters())
    assert model[0].label == "first"
    assert {p.dtype for p in model[1].parameters()} == {torch.float64}
    assert {p.device.type for p in model[2].parameters()} == {"meta"}
    x = torch.randn(N, L, E, dtype=torch.float64)
    model[1](x, x, x)
    assert seen == ["before", "projection", "after"]
    for handle in handles:
        handle.remove()
    model[1](x, x, x)
    assert len(seen) == 3


def test_a_shared_layer_is_swapped_once() -> None:
    shared = nn.MultiheadAttention(E, H, batch_first=True)
    model = nn.ModuleDict(
        {"a": nn.ModuleList([shared]), "b": shared, "c": nn.MultiheadAttention(E, H)}
    )
    linearize_(model)
    assert model["a"][0] is model["b"] is not model["c"]
    assert type(model["b"]) is LinearAttention
    twice = model["b"]
    assert linearize_(model)["b"] is twice  # nothing left to do, and no error


def test_a_model_that_is_an_attention_layer() -> None:
    old = nn.MultiheadAttention(E, H)
    new = linearize_(old)
    assert type(new) is LinearAttention and new.in_proj_weight is old.in_proj_weight


def test_options() -> None:
    model = linearize_(nn.TransformerDecoderLayer(E, H, F), "exp", causal=True, eps=0.5)
    for layer in (model.self_attn, model.multihead_attn):
        assert (layer.feature_map.name, layer.causal, layer.eps) == ("exp", True, 0.5)


def test_each_layer_has_a_copy_of_a_learnable_map() -> None:
    given = Learned(E // H, 5)
    old = nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False)
    model = linearize_(copy.deepcopy(old), given)
    maps = [layer.self_attn.feature_map for layer in model.layers]
    assert maps[0] is not maps[1] and given not in maps
    new = {n for n, _ in model.named_parameters()} - {n for n, _ in old.named_parameters()}
    assert new == {
        f"layers.{i}.self_attn.feature_map.linear.{n}" for i in (0, 1) for n in ("weight", "bias")
    }
    model(torch.randn(N, L, E)).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_what_would_be_lost_is_refused_and_nothing_swapped() -> None:
    class Own(nn.MultiheadAttention):
        def forward(self, *args: Any, **call: Any) -> Any:
            return super().forward(*args, **call)

    class Plain(nn.MultiheadAttention):
        pass

    parametrized = nn.MultiheadAttention(E, H)
    nn.utils.parametrizations.weight_norm(parametrized, "in_proj_weight")
    patched = nn.MultiheadAttention(E, H)
    patched.forward = lambda *args: args  # type: ignore[method-assign]
    zero = nn.MultiheadAttention(E, H, add_zero_attn=True)
    for layer, error, text in (
        (Own(E, H), TypeError, "deep.last: expected nn.MultiheadAttention's own forward.*Own"),
        (patched, TypeError, "deep.last: expected nn.MultiheadAttention's own forward"),
        (parametrized, TypeError, "deep.last: expected plain parameters.*remove_parametrizations"),
        (zero, ValueError, "deep.last.add_zero_attn: expected False"),
    ):
        first = nn.MultiheadAttention(E, H)
        model = nn.ModuleDict({"first": first, "deep": nn.ModuleDict({"last": layer})})
        with pytest.raises(error, match=text):
            linearize_(model)
        assert model["first"] is first
    assert type(linearize_(Plain(E, H))) is LinearAttention
    with pytest.raises(ValueError, match=r"expected at least one nn.MultiheadAttention.*Linear"):
        linearize_(nn.Linear(2, 3))
