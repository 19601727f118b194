"""`linear_attention` of tensors: the definition, faults of the field, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch_cases import DTYPES, close, inputs, normal, same  # noqa: E402

from linattn import State, feature_maps, linear_attention, softmax_attention  # noqa: E402

Array = Any

both_forms = pytest.mark.parametrize("causal", [False, True])
every_dtype = pytest.mark.parametrize("dtype", list(DTYPES))


@every_dtype
@both_forms
@pytest.mark.parametrize("name", feature_maps.names())
def test_definition(name: str, dtype: str, causal: bool, road: str) -> None:
    for n in (1, 13, 131):
        q, k, v = inputs(n, (2,), n, 17, 3, DTYPES[dtype])
        out = linear_attention(q, k, v, name, causal=causal)
        assert out.dtype == DTYPES[dtype]
        close(out, q, k, v, name, causal=causal)


@both_forms
@pytest.mark.parametrize("name", ["elu1", "exp", "identity"])
def test_05_06_19_masked_keys_are_as_if_removed(name: str, causal: bool, road: str) -> None:
    q, k, v = inputs(1, (2,), 67, 5, 3)
    if name == "identity":
        q, k = q.abs(), k.abs()
    mask = normal(9, 67) > -0.5
    clean = linear_attention(q, k, v, name, causal=causal, key_mask=mask)
    k[:, ~mask], v[:, ~mask] = torch.nan, torch.inf
    before = [x.clone() for x in (q, k, v, mask)]
    same(linear_attention(q, k, v, name, causal=causal, key_mask=mask), clean)
    for x, y in zip((q, k, v), before, strict=False):
        same(x, y)
    assert torch.equal(mask, before[3])


@pytest.mark.parametrize("name", ["elu1", "exp", "relu"])
@pytest.mark.parametrize("change", ["x20", "x20000", "nan", "inf"])
def test_08_no_look_ahead(name: str, change: str, road: str) -> None:
    for n in (5, 33, 131):
        q, k, v = inputs(n, (), n, 7, 3)
        before = linear_attention(q, k, v, name, causal=True)
        for x in (k, v):
            x[-1] = x[-1] * float(change[1:]) if change.startswith("x") else float(change)
        same(linear_attention(q, k, v, name, causal=True)[:-1], before[:-1])


def test_23_masks_of_other_kinds_are_refused() -> None:
    q, k, v = inputs(2, (3, 3), 5, 2, 2)
    for mask, words in (
        (torch.ones(5), "boolean"),
        (torch.ones(5, dtype=torch.uint8), "bool"),
        (torch.ones(4, dtype=torch.bool), "one entry"),
        (torch.ones(3, 5, dtype=torch.bool), "key_mask"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            linear_attention(q, k, v, key_mask=mask)


def test_26_27_sequences_and_batches(road: str) -> None:
    q, k, v = inputs(3, (2,), 7, 5, 3)
    for causal in (False, True):
        out = linear_attention(q, k, v, causal=causal, cu_seqlens=torch.tensor([0, 3, 3, 7]))
        for a, b in ((0, 3), (3, 7)):
            part = [x[:, a:b] for x in (q, k, v)]
            torch.testing.assert_close(out[:, a:b], linear_attention(*part, causal=causal))
        one = linear_attention(q[:1], k[:1], v[:1], causal=causal)
        torch.testing.assert_close(linear_attention(q, k, v, causal=causal)[:1], one)


def test_tensors_that_differ_are_refused() -> None:
    q, k, v = inputs(4, (), 5, 2, 2)
    with pytest.raises(TypeError, match="q, k, v: expected one dtype, got .*torch.float64"):
        linear_attention(q, k.double(), v)
    with pytest.raises(ValueError, match="expected one device"):
        linear_attention(q, k.to("meta"), v)
    with pytest.raises(TypeError, match=r"k: expected a torch.Tensor"):
        linear_attention(q, k.numpy(), v)
    with pytest.raises(TypeError, match="q: expected dtype"):
        linear_attention(q.long(), k.long(), v.long())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_tensors_are_refused(dtype: Any) -> None:
    """With a remedy that says what happens to the imaginary part."""
    q, k, v = inputs(4, (), 5, 2, 2)
    expected = rf"q: expected dtype .*got {dtype}; .*as in q\.real, or torch\.view_as_real\(q\)"
    with pytest.raises(TypeError, match=expected):
        linear_attention(q.to(dtype), k.to(dtype), v.to(dtype))
    with pytest.raises(TypeError, match=r"k: expected dtype .*as in k\.real"):
        State.of(k.to(dtype), v.to(dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_autocast(dtype: str) -> None:
    """As for scaled_dot_product_attention; the sums stay wide."""
    kind = DTYPES[dtype]
    q, k, v = inputs(5, (2,), 37, 5, 7, grad=True)
    with torch.autocast("cpu", dtype=kind):
        out, state = linear_attention(q, k, v, return_state=True)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        assert linear_attention(q.double(), k.double(), v.double()).dtype == torch.float64
    assert out.dtype == theirs.dtype == kind
    assert state.kv.dtype == torch.float64
    same(out.detach(), linear_attention(*(x.detach().to(kind) for x in (q, k, v))))
    out.sum().backward()
    assert q.grad.dtype == torch.float32


@both_forms
def test_softmax_attention(causal: bool) -> None:
    q, k, v = inputs(6, (2, 3), 37, 5, 7)
    mask = normal(7, 37) > -1
    for m in (None, mask):
        arrays = (x.numpy() for x in (q, k, v))
        right = softmax_attention(*arrays, causal=causal, key_mask=None if m is None else m.numpy())
        found = softmax_attention(q, k, v, causal=causal, key_mask=m)
        torch.testing.assert_close(found, torch.from_numpy(right), rtol=1e-4, atol=1e-5)
