"""Gradients: against finite differences, the definition's meaning, and the composite."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from torch_cases import DTYPES, check_gradients, inputs, normal, same  # noqa: E402

from linattn import FeatureMap, State, feature_maps, linear_attention  # noqa: E402
from linattn.torch import _composite, _maps  # noqa: E402

Array = Any

every_map = pytest.mark.parametrize("name", feature_maps.names())
both_forms = pytest.mark.parametrize("causal", [False, True])


def gradients(f: Any, x: Any, upstream: Any) -> Any:
    return torch.autograd.grad(f(*x), x, upstream)


def bound(q: Any, k: Any, v: Any, g: Any, name: str, eps: float, causal: bool) -> Any:
    """The gradients with every term's absolute value: what their roundings are relative to."""
    f, h = _maps.apply(name, q), _maps.apply(name, k)
    df, dh = (_maps.slope(name, x, y) for x, y in ((q, f), (k, h)))
    weights = f @ h.mT
    seen = torch.ones_like(weights).tril() if causal else torch.ones_like(weights)
    weights = weights * seen
    den = weights.sum(-1, keepdim=True) + eps
    dnum = g.abs() / torch.where(den == 0, torch.inf, den)
    dden = (dnum * (weights @ v.abs()) / torch.where(den == 0, torch.inf, den)).sum(
        -1, keepdim=True
    )
    slopes = seen * (dnum @ v.abs().mT + dden)
    return df * (slopes @ h), dh * (slopes.mT @ f), weights.mT @ dnum


def _attend(name: str, *x: Any, **options: Any) -> Any:
    return linear_attention(*x, name, **options)


@every_map
@both_forms
def test_gradcheck(name: str, causal: bool, road: str) -> None:
    """First and second derivatives, through the division; rows 15, 17, 18."""
    x = inputs(1, (2,), 7, 3, 2, torch.float64, grad=True)
    eps = 0.1 if name in ("relu", "squared_relu", "identity") else None
    check_gradients(lambda *x: linear_attention(*x, name, eps, causal=causal), x)


@pytest.mark.parametrize("name", ["elu1", "exp"])
@both_forms
def test_gradcheck_of_options(name: str, causal: bool, road: str) -> None:
    q, k, v = inputs(2, (), 7, 3, 2, torch.float64, grad=True)
    mask = torch.tensor([False, True, True, False, True, True, False])
    cuts = torch.tensor([0, 3, 3, 7])
    for options in ({"key_mask": mask}, {"cu_seqlens": cuts}, {"normalize": False}):
        check_gradients(partial(_attend, name, causal=causal, **options), (q, k, v))


@pytest.mark.parametrize("name", ["elu1", "exp"])
@both_forms
def test_gradcheck_of_broadcast_and_grouped_heads(name: str, causal: bool, road: str) -> None:
    q = normal(1, 2, 4, 5, 3, dtype=torch.float64).requires_grad_()
    k = normal(2, 1, 2, 5, 3, dtype=torch.float64).requires_grad_()
    v = normal(3, 2, 5, 2, dtype=torch.float64).requires_grad_()
    check_gradients(
        lambda *x: linear_attention(*x, name, causal=causal, enable_gqa=True), (q, k, v)
    )
    one = normal(4, 1, 5, 3, dtype=torch.float64).requires_grad_()
    check_gradients(lambda *x: linear_attention(*x, name, causal=causal), (one, k, v))


@pytest.mark.parametrize("name", ["elu1", "exp"])
@both_forms
def test_gradcheck_through_states(name: str, causal: bool, road: str) -> None:
    """Through `state=` and the returned state, with a gradient for either alone too."""
    x = inputs(3, (), 5, 3, 2, torch.float64, grad=True)
    y = inputs(4, (), 7, 3, 2, torch.float64, grad=True)

    def whole(*x: Any) -> Any:
        first, state = linear_attention(*x[:3], name, causal=causal, return_state=True)
        second, last = linear_attention(*x[3:], name, causal=causal, state=state, return_state=True)
        return first, second, last.query(x[3]), (last + state).query(x[0])

    check_gradients(whole, x + y)
    check_gradients(lambda *x: whole(*x)[2], x + y)


@pytest.mark.parametrize("name", ["elu1", "exp"])
def test_gradient_of_a_continuation_is_that_of_the_whole(name: str, road: str) -> None:
    x = inputs(5, (2, 3), 131, 5, 7, torch.float64, grad=True)
    g = normal(1, 2, 3, 131, 7, dtype=torch.float64)

    def parts(*x: Any) -> Any:
        state, outs = None, []
        for a, b in ((0, 37), (37, 100), (100, 131)):
            out, state = linear_attention(
                *(t[..., a:b, :] for t in x), name, causal=True, state=state, return_state=True
            )
            outs.append(out)
        return torch.cat(outs, -2)

    right = gradients(lambda *x: linear_attention(*x, name, causal=True), x, g)
    for a, b in zip(gradients(parts, x, g), right, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", list(DTYPES))
@every_map
@both_forms
def test_native_gradients_are_the_composites(name: str, causal: bool, dtype: str) -> None:
    """And so are those of two passes, which serve other devices."""
    kind = DTYPES[dtype]
    eps = 0.5 if name == "identity" else feature_maps.get(name).eps
    for n in (1, 67, 257):
        x = inputs(n, (2, 3), n, 5, 7, kind, grad=True)
        if name == "identity":
            x = tuple(t.detach().abs().requires_grad_() for t in x)
        g = normal(7, 2, 3, n, 7, dtype=kind)
        call = (name, eps, causal, None, None, False, True, None)
        y = [t.detach().double().requires_grad_() for t in x]
        whole, _ = _composite.attend(*y, *call, False)
        right = torch.autograd.grad(whole, y, g.double())
        out = linear_attention(*x, name, eps, causal=causal)
        native = torch.autograd.grad(out, x, g)
        passes = _composite.backward(
            g, None, None, *(t.detach() for t in x), out.detach(), *call, None
        )
        step = torch.finfo(kind).eps
        bounds = bound(*(t.detach().double() for t in x), g.double(), name, eps, causal)
        for a, b, c, limit in zip(native, passes, right, bounds, strict=False):
            for found in (a, b):
                assert found.dtype == kind
                assert ((found - c).abs() <= 4 * step * limit + torch.finfo(kind).tiny).all()


@both_forms
def test_16_upstream_gradients_of_any_layout(causal: bool, road: str) -> None:
    x = inputs(6, (2,), 37, 5, 7, grad=True)
    f = lambda *x: linear_attention(*x, causal=causal)  # noqa: E731
    ones = gradients(f, x, torch.ones(2, 37, 7))
    for a, b in zip(torch.autograd.grad(f(*x).sum(), x), ones, strict=True):
        same(a, b)
    g = normal(1, 7, 37, 2)
    for a, b in zip(
        gradients(f, x, g.permute(2, 1, 0)), gradients(f, x, g.permute(2, 1, 0).contiguous()),
        strict=True,
    ):  # fmt: skip
        same(a, b)


@both_forms
@pytest.mark.parametrize("name", ["elu1", "exp", "relu"])
def test_07_fully_masked_rows_have_zero_gradients(name: str, causal: bool, road: str) -> None:
    x = inputs(7, (2,), 37, 5, 7)
    poisoned = [t.clone() for t in x]
    late = torch.arange(37) >= 20
    for t in poisoned[1:]:
        t[:, ~late] = torch.nan
    for mask in (torch.zeros(37, dtype=torch.bool), late):
        y = [t.clone().requires_grad_() for t in (x[0], *poisoned[1:])]
        linear_attention(*y, name, causal=causal, key_mask=mask).sum().backward()
        for t in y:
            assert torch.isfinite(t.grad).all()
        for t in y[1:]:
            assert (t.grad[:, ~mask] == 0).all()
        if causal or not mask.any():
            seen = late if mask.any() else mask
            assert (y[0].grad[:, ~seen] == 0).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@both_forms
def test_02_gradients_of_long_sums_in_half_precision(dtype: str, causal: bool, road: str) -> None:
    n = 20_000
    x = torch.full((n, 3), 4.0, dtype=DTYPES[dtype], requires_grad=True)
    v = torch.ones(n, 2, dtype=DTYPES[dtype], requires_grad=True)
    out = linear_attention(x, x, v, causal=causal)
    assert (out == 1).all()
    out.backward(torch.ones_like(out))
    assert torch.isfinite(x.grad).all()
    assert torch.isfinite(v.grad).all()


def test_15_a_common_scale_of_queries_has_no_gradient(road: str) -> None:
    q, k, v = inputs(8, (), 37, 5, 7, torch.float64)
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    out = linear_attention(q.abs() * scale, k, v, "relu", 0.0)
    (found,) = torch.autograd.grad(out.sum(), scale)
    assert abs(float(found)) < 1e-12


def test_derivatives_at_the_kinks(road: str) -> None:
    """phi'(0) is 1 for elu1 and 0 for relu."""
    for name, slope in (("elu1", 1.0), ("relu", 0.0), ("softplus", 0.5), ("sigmoid", 0.25)):
        zero = torch.zeros(1, 1, requires_grad=True)
        one = torch.ones(1, 1)
        # q . phi(k) v, with phi(q) = 1 for a query that relu, too, leaves at 1
        out = linear_attention(one, zero, one, name, normalize=False)
        (found,) = torch.autograd.grad(out, zero)
        phi = float(feature_maps.get(name)(one))
        assert float(found) == pytest.approx(slope * phi, rel=1e-6)
        (found,) = torch.autograd.grad(feature_maps.get(name)(zero), zero)
        assert float(found) == pytest.approx(slope, rel=1e-6)


def test_gradients_reach_a_map_that_learns(road: str) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(5, 11), torch.nn.Softplus())
    x = inputs(9, (2,), 37, 5, 7)
    for phi in (module, FeatureMap("mine", "exp", module[0], eps=0.0)):
        for causal in (False, True):
            module.zero_grad()
            linear_attention(*x, phi, causal=causal).square().sum().backward()
            assert all(
                p.grad is not None and p.grad.abs().sum() > 0 for p in module[0].parameters()
            )


def test_exp_far_out(road: str) -> None:
    """Keys of +-100, for which exp is no float32, and far beyond."""
    for size in (100.0, 1000.0):
        k = torch.tensor([[size, -size], [-size, size], [0.0, 0.0]], requires_grad=True)
        q = torch.tensor([[-size, size], [size, -size], [1.0, 0.0]], requires_grad=True)
        v = torch.tensor([[1.0], [2.0], [4.0]], requires_grad=True)
        for causal in (False, True):
            out = linear_attention(q, k, v, "exp", causal=causal)
            right = linear_attention(*(x.detach().numpy() for x in (q, k, v)), "exp", causal=causal)
            np.testing.assert_allclose(out.detach().numpy(), right, rtol=1e-5)
            for g in torch.autograd.grad(out.sum(), (q, k, v)):
                assert torch.isfinite(g).all()


def test_inputs_and_saved_sums_are_guarded() -> None:
    """What a gradient needs is changed: torch says so instead of going on with other numbers."""
    q, k, v = inputs(10, (), 37, 5, 7, grad=True)
    state = State.of(k.detach(), v.detach())
    out = linear_attention(q, k, v, state=state)
    with torch.no_grad():
        state.step(q[:1], k[:1], v[:1])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_memory_that_a_gradient_holds() -> None:
    """Inputs and output, and a state only where it is small beside them."""
    held: list[Any] = []

    def pack(x: Any) -> Any:
        held.append(x)
        return x

    for n in (64, 16_384):
        held.clear()
        q, k, v = inputs(11, (2,), n, 64, 64, grad=True)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = linear_attention(q, k, v, causal=True)
        inside = sum(x.numel() * x.element_size() for x in (q, k, v, out))
        assert sum(x.numel() * x.element_size() for x in held) <= 1.05 * inside
