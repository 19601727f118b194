"""Maps with a closed form on tensors: both orders, their gradients, and their memory."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cases  # noqa: E402
import numpy as np  # noqa: E402
from cases import CLOSED as MAPS  # noqa: E402
from torch_cases import DTYPES, array, check_gradients, close, inputs, normal, same  # noqa: E402

from linattn import State, feature_maps, linear_attention, plan  # noqa: E402
from linattn.torch import _closed, _roads  # noqa: E402

# What torch itself warns of while it compiles.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*functools.lru_cache.*:UserWarning"),
]

Array = Any
SMALL = {  # of few features, for derivatives number by number
    found.name: found
    for found in (feature_maps.taylor(), feature_maps.polynomial(2, offset=0.5, scale=0.5))
}
C = 8.0

every_map = pytest.mark.parametrize("name", list(MAPS))
small_map = pytest.mark.parametrize("name", list(SMALL))
both_forms = pytest.mark.parametrize("causal", [False, True])


def attend(found: Any, *x: Any, order: str, causal: bool, **options: Any) -> Any:
    """With the choice of order taken away in the causal form too."""
    made = _closed.Options(found, found.eps, causal, False, True, False, order)
    return _closed.attend(*x, made, options.get("key_mask"), options.get("cuts"), None)[0]


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few rows, so that short sequences have several, and ends of blocks."""
    for name, size in (("ROWS", 3), ("LEAST", 1), ("KEYS", 4), ("FEATURES", 2)):
        monkeypatch.setattr(_closed, name, size)


# --------------------------------------------------------------------------------------- forwards


@every_map
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_both_orders_around_the_edges_of_blocks(name: str, dtype: str) -> None:
    found = MAPS[name]
    for n in (1, 255, 256, 257, 521):
        q, k, v = inputs(n, (), n, 3, 5, DTYPES[dtype])
        for order in ("linear", "quadratic", "auto"):
            out = linear_attention(q, k, v, found, order=order)  # type: ignore[arg-type]
            assert out.dtype == DTYPES[dtype]
            close(out, q, k, v, found, c=C)
        for order in ("linear", "quadratic"):
            out = attend(found, q, k, v, order=order, causal=True)
            close(out, q, k, v, found, causal=True, c=C)
        close(linear_attention(q, k, v, found, causal=True), q, k, v, found, causal=True, c=C)


def test_taylor_in_both_orders_on_both_sides_of_the_crossover() -> None:
    found, d = feature_maps.taylor(), 16
    D, row = found.width(d), found.row_operations(d)
    crossover = plan(1, 1, d, D=D, closed_form=True, row_operations=row).crossover
    for n in (crossover // 3, crossover - 1, crossover, 3 * crossover):
        q, k, v = inputs(n, (2,), n, d, d)
        for order in ("linear", "quadratic", "auto"):
            out = linear_attention(q, k, v, found, order=order)  # type: ignore[arg-type]
            close(out, q, k, v, found, c=C)
        cheaper = "quadratic" if n < crossover else "linear"
        out = linear_attention(q, k, v, found, order=cheaper)  # type: ignore[arg-type]
        same(linear_attention(q, k, v, found), out)


@every_map
@both_forms
def test_with_everything(name: str, causal: bool) -> None:
    """Grouped heads, masks, packed sequences, states in and out, over several chunks."""
    found, n = MAPS[name], 600
    q, k, v = normal(1, 2, 4, n, 3), normal(2, 2, 2, n, 3), normal(3, 2, 2, n, 5)
    q, k, v = (x.double() for x in (q, k, v))
    mask = normal(4, 2, 1, n) > -0.5
    cuts = torch.tensor([0, 3, 3, 280, n])
    shared: dict[str, Any] = {"enable_gqa": True, "key_mask": mask}
    kv = State.of(*(normal(5, 2, 2, 11, d).double() for d in (3, 5)), found)
    packed = State.of(*(normal(5, 4, 2, 2, 11, d).double() for d in (3, 5)), found)
    for before, more in (
        (None, {}), (kv, {}), (None, {"cu_seqlens": cuts}), (packed, {"cu_seqlens": cuts}),
    ):  # fmt: skip
        options: dict[str, Any] = {**shared, **more, "causal": causal}
        given = {**options, "cu_seqlens": cuts.tolist()} if more else options
        sums = None if before is None else (before.kv.numpy(), before.k_sum.numpy())
        out, after = linear_attention(q, k, v, found, **options, state=before, return_state=True)
        close(out, q, k, v, found, **given, state=sums, c=C)
        if before is None:
            alone = linear_attention(q, k, v, found, **options)
            close(alone, q, k, v, found, **given, c=C)
        if not more:
            whole = State.of(k, v, found, key_mask=mask)
            whole = whole if before is None else whole + before
            torch.testing.assert_close(after.kv, whole.kv, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(after.k_sum, whole.k_sum, rtol=1e-9, atol=1e-9)
        assert after.batch_shape == ((4, 2, 2) if more else (2, 2))


@both_forms
def test_leading_axes(causal: bool) -> None:
    """Broadcast and empty ones, many small heads together and large ones alone."""
    found = feature_maps.taylor()
    q, k, v = normal(1, 3, 1, 2, 13, 3), normal(2, 5, 1, 13, 3), normal(3, 2, 13, 7)
    for order in ("linear", "quadratic"):
        out = attend(found, q, k, v, order=order, causal=causal)
        close(out, q, k, v, found, causal=causal, c=C)
    one = linear_attention(*(x[..., :1, :, :] for x in (q, k, v)), found, causal=causal)
    torch.testing.assert_close(out[..., :1, :, :], one)
    assert linear_attention(q[:0], k, v, found, causal=causal).shape == (0, 5, 2, 13, 7)
    none = linear_attention(q, k[..., :0, :], v[..., :0, :], found)
    assert (none == 0).all()
    assert linear_attention(q[..., :0, :], k, v, found).shape == (3, 5, 2, 0, 7)


@every_map
@pytest.mark.parametrize("order", ["linear", "quadratic"])
def test_prefix_over_chunks(name: str, order: str) -> None:
    found, n = MAPS[name], 600
    q, k, v = inputs(7, (2,), n, 3, 5)
    out = attend(found, q, k, v, order=order, causal=True)
    for t, bad in itertools.product((0, 100, 255, 256, 511, 598), (torch.nan, torch.inf, 1e30)):
        for which in ((0,), (1,), (2,), (0, 1, 2)):
            spoilt = [q, k, v]
            for i in which:
                spoilt[i] = spoilt[i].clone()
                spoilt[i][:, t + 1 :: 3] = bad
            again = attend(found, *spoilt, order=order, causal=True)
            same(out[:, : t + 1], again[:, : t + 1])


@every_map
@both_forms
def test_masked_keys_are_as_if_removed(name: str, causal: bool) -> None:
    found = MAPS[name]
    q, k, v = inputs(1, (2,), 300, 3, 5, grad=True)
    mask = normal(9, 300) > -0.5
    bad = [x.detach().clone() for x in (q, k, v)]
    bad[1][:, ~mask], bad[2][:, ~mask] = torch.nan, torch.inf
    bad = [x.requires_grad_() for x in bad]
    g = normal(3, 2, 300, 5)
    for order in ("linear", "quadratic"):
        f = partial(attend, found, order=order, causal=causal, key_mask=mask)
        same(f(*bad), f(q, k, v))
        given = zip(*(torch.autograd.grad(f(*x), x, g) for x in (bad, [q, k, v])), strict=True)
        for i, (a, b) in enumerate(given):
            same(a, b)
            assert i == 0 or (a[:, ~mask] == 0).all()


@every_map
@both_forms
def test_beyond_the_range_of_float32(name: str, causal: bool) -> None:
    """Where scores leave it and the answer doesn't; gradients too."""
    found = MAPS[name]
    q, k, v = inputs(8, (), 300, 3, 5)
    q, k = q * 1e3, k * 1e18
    x = [t.requires_grad_() for t in (q, k, v)]
    wide = [t.detach().double().requires_grad_() for t in x]
    g = normal(1, 300, 5)
    for order in ("linear", "quadratic"):
        out = attend(found, *x, order=order, causal=causal)
        close(out.detach(), *(t.detach() for t in x), found, causal=causal, c=C)
        right = torch.autograd.grad(
            attend(found, *wide, order=order, causal=causal), wide, g.double()
        )
        for a, b in zip(torch.autograd.grad(out, x, g), right, strict=True):
            scale = b.abs().max()
            torch.testing.assert_close(a.double() / scale, b / scale, rtol=1e-4, atol=1e-5)


@every_map
def test_states(name: str) -> None:
    """Made and changed in blocks, alone and with a gradient; broadcast keys, masks."""
    found = MAPS[name]
    q, k, v = normal(1, 2, 3, 9, 3), normal(2, 3, 300, 3), normal(3, 2, 1, 300, 5)
    mask = normal(4, 300) > -0.5
    for m in (None, mask):
        own = None if m is None else m.numpy()
        right = State.of(array(k).astype(float), array(v).astype(float), found, key_mask=own)
        size = State.of(array(k).astype(float), np.abs(array(v)).astype(float), found, key_mask=own)
        scale = np.abs(size.kv).max()
        state = State.of(k, v, found, key_mask=m)
        assert state.batch_shape == right.batch_shape == (2, 3)
        np.testing.assert_allclose(state.kv.numpy(), right.kv, rtol=1e-5, atol=1e-6 * scale)
        parts = State.zeros((2, 3), state.D, 5, found, torch.float32)
        for a, b in ((0, 37), (37, 300)):
            part = None if m is None else m[a:b]
            assert parts.absorb(k[..., a:b, :], v[..., a:b, :], part) is parts
        np.testing.assert_allclose(parts.kv.numpy(), right.kv, rtol=1e-5, atol=1e-6 * scale)
        np.testing.assert_allclose(parts.k_sum.numpy(), right.k_sum, rtol=1e-5, atol=1e-6 * scale)
        torch.testing.assert_close(
            state.query(q), linear_attention(q, k, v, found, key_mask=m), rtol=1e-4, atol=1e-4
        )
    k.requires_grad_()
    State.of(k, v, found).query(q).sum().backward()
    assert k.grad is not None
    with pytest.raises(RuntimeError, match="absorb"):
        parts.absorb(k, v)
    with pytest.raises(ValueError, match=f"D = {state.D}"):
        parts.absorb(k.detach()[..., :2], v)


def test_out_and_inputs() -> None:
    found = feature_maps.taylor()
    q, k, v = inputs(9, (2,), 300, 5, 7, torch.float16)
    state = State.of(k, v, found)
    held = [q, k, v, state.kv, state.k_sum]
    before = [x.clone() for x in held]
    for options in ({}, {"causal": True}, {"state": state}, {"order": "quadratic"}):
        out = torch.full((2, 300, 7), torch.nan, dtype=torch.float16)
        assert linear_attention(q, k, v, found, **options, out=out) is out  # type: ignore[call-overload]
        same(out, linear_attention(q, k, v, found, **options))  # type: ignore[call-overload]
    for x, y in zip(held, before, strict=True):
        same(x, y)
    with pytest.raises(ValueError, match="a state with D = 3"):
        linear_attention(q, k, v, found, state=State.zeros((2,), 3, 7, found, torch.float16))


# ---------------------------------------------------------------------------------------- gradients


@small_map
@both_forms
@pytest.mark.parametrize("order", ["linear", "quadratic"])
def test_gradcheck(name: str, causal: bool, order: str, blocks: None) -> None:
    x = inputs(1, (2,), 7, 3, 2, torch.float64, grad=True)
    check_gradients(partial(attend, SMALL[name], order=order, causal=causal), x)


@both_forms
def test_gradcheck_of_options(causal: bool, blocks: None) -> None:
    x = inputs(2, (), 7, 2, 1, torch.float64, grad=True)
    mask = torch.tensor([False, True, True, False, True, True, False])
    cuts = torch.tensor([0, 2, 2, 7])
    for i, options in enumerate(({"key_mask": mask}, {"cu_seqlens": cuts}, {"normalize": False})):
        f = partial(linear_attention, feature_map="taylor", causal=causal, **options)
        check_gradients(f if i % 2 else lambda *x, f=f: f(*x, return_state=True)[0], x)
    both = {"key_mask": mask, "normalize": False}
    check_gradients(partial(linear_attention, feature_map="taylor", causal=causal, **both), x)


@both_forms
def test_gradcheck_of_broadcast_and_grouped_heads(causal: bool, blocks: None) -> None:
    q = normal(1, 2, 4, 5, 2, dtype=torch.float64).requires_grad_()
    k = normal(2, 1, 2, 5, 2, dtype=torch.float64).requires_grad_()
    v = normal(3, 2, 5, 1, dtype=torch.float64).requires_grad_()
    f = partial(linear_attention, feature_map="taylor", causal=causal)
    one = normal(4, 1, 5, 2, dtype=torch.float64).requires_grad_()
    check_gradients(lambda *x: f(*x, enable_gqa=True), (q, k, v))
    check_gradients(lambda *x: f(*x, enable_gqa=True, order="linear"), (q, k, v))  # type: ignore[call-overload]
    check_gradients(f, (one, k, v))


@both_forms
@pytest.mark.parametrize("packed", [False, True])
def test_gradcheck_through_states(causal: bool, packed: bool, blocks: None) -> None:
    """Through `state=` and the returned state, with a gradient for either alone too."""
    x = inputs(3, (), 4, 2, 1, torch.float64, grad=True)
    y = inputs(4, (), 5, 2, 1, torch.float64, grad=True)
    cuts = [torch.tensor([0, 1, 1, n]) if packed else None for n in (4, 5)]
    options: dict[str, Any] = {"feature_map": "taylor", "causal": causal, "return_state": True}

    def whole(*x: Any) -> Any:
        first, state = linear_attention(*x[:3], cu_seqlens=cuts[0], **options)
        second, last = linear_attention(*x[3:], cu_seqlens=cuts[1], state=state, **options)
        return first, second, last.query(x[3])

    check_gradients(whole, x + y)
    check_gradients(lambda *x: whole(*x)[2], x + y)


def bound(found: Any, q: Any, k: Any, v: Any, g: Any, causal: bool) -> Any:
    """The gradients with every term's absolute value, those within q . k too."""
    q, k, v, g = (x.detach().double() for x in (q, k, v, g))
    seen = torch.ones(q.shape[-2], k.shape[-2]).tril() if causal else 1.0
    left, right = found.prepare(q), found.prepare(k)
    den = (found.kappa(left @ right.mT) * seen).sum(-1, keepdim=True) + found.eps
    factor = left.abs().max() / q.abs().max()
    left, right, v, g = left.abs(), right.abs(), v.abs(), g.abs()
    t = (left @ right.mT).requires_grad_()
    weights = found.kappa(t)
    (slope,) = torch.autograd.grad(weights.sum(), t)
    weights = weights.detach() * seen
    dnum = g / den
    dden = (dnum * (weights @ v) / den).sum(-1, keepdim=True)
    dt = slope * seen * (dnum @ v.mT + dden)
    return factor * dt @ right, factor * dt.mT @ left, weights.mT @ dnum


@pytest.mark.parametrize("dtype", list(DTYPES))
@every_map
@both_forms
def test_gradients_are_those_of_expanded_features(name: str, causal: bool, dtype: str) -> None:
    found, kind = MAPS[name], DTYPES[dtype]
    for n in (1, 257, 600):
        x = inputs(n, (2,), n, 3, 5, kind, grad=True)
        g = normal(7, 2, n, 5, dtype=kind)
        y = [t.detach().double().requires_grad_() for t in x]
        whole, _ = _roads.expanded(
            found, *y, found.eps, causal, None, None, False, True, None, False, "linear"
        )
        right = torch.autograd.grad(whole, y, g.double())
        limits = bound(found, *x, g, causal)
        step = max(torch.finfo(kind).eps, 2**-40)
        for order in ("linear", "quadratic"):
            out = attend(found, *x, order=order, causal=causal)
            for a, b, limit in zip(torch.autograd.grad(out, x, g), right, limits, strict=True):
                assert a.dtype == kind
                assert ((a - b).abs() <= C * step * limit + torch.finfo(kind).tiny).all()


def test_gradients_with_a_tensor_used_twice_and_upstream_of_any_layout(blocks: None) -> None:
    x = normal(1, 2, 11, 3, dtype=torch.float64).requires_grad_()
    check_gradients(lambda x: linear_attention(x, x, torch.sin(x), "taylor", causal=True), (x,))
    a = torch.autograd.grad(linear_attention(x, x, x, "taylor").sum(), x)[0]
    b = torch.autograd.grad(linear_attention(x, x, x, "taylor"), x, torch.ones_like(x))[0]
    same(a, b)
    q, k, v = inputs(2, (2,), 11, 3, 5, grad=True)
    g = normal(1, 5, 11, 2).permute(2, 1, 0)
    for causal in (False, True):
        f = lambda *x, causal=causal: linear_attention(*x, "taylor", causal=causal)  # noqa: E731
        first = torch.autograd.grad(f(q, k, v), (q, k, v), g)
        second = torch.autograd.grad(f(q, k, v), (q, k, v), g.contiguous())
        for a, b in zip(first, second, strict=True):
            same(a, b)
        (alone,) = torch.autograd.grad(f(q, k.detach(), v.detach()), q, g)
        same(alone, first[0])


@both_forms
def test_fully_masked_rows_have_zero_gradients(causal: bool) -> None:
    q, k, v = inputs(7, (2,), 37, 5, 7)
    k[:], v[:] = torch.nan, torch.inf
    x = [t.requires_grad_() for t in (q, k, v)]
    out = linear_attention(*x, "taylor", causal=causal, key_mask=torch.zeros(37, dtype=torch.bool))
    assert (out == 0).all()
    for g in torch.autograd.grad(out.sum(), x):
        assert (g == 0).all()


# ---------------------------------------------------------------------------------- modes of torch


@both_forms
def test_compiled_transformed_and_fake(causal: bool) -> None:
    """Features are expanded for transforms and fakes; torch.compile calls the closed form."""
    x = inputs(4, (3,), 37, 5, 7, torch.float64)
    f = lambda *x: linear_attention(*x, "taylor", causal=causal)  # noqa: E731
    right = f(*x)
    torch.testing.assert_close(torch.func.vmap(f)(*x), right)
    leaves = [t.clone().requires_grad_() for t in x]
    slopes = torch.autograd.grad(f(*leaves).square().sum(), leaves)
    found = torch.func.grad(lambda *x: f(*x).square().sum(), (0, 1, 2))(*x)
    for a, b in zip(found, slopes, strict=True):
        torch.testing.assert_close(a, b)
    _, tangent = torch.func.jvp(f, x, x)
    h = 1e-6
    up, down = (f(*(t * (1 + s * h) for t in x)) for s in (1, -1))
    torch.testing.assert_close(tangent, (up - down) / (2 * h), rtol=1e-6, atol=1e-8)
    torch._dynamo.reset()
    made = torch.compile(f, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(made(*x), right)
    for a, b in zip(torch.autograd.grad(made(*leaves).square().sum(), leaves), slopes, strict=True):
        torch.testing.assert_close(a, b)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert f(*(torch.empty(t.shape) for t in x)).shape == right.shape


@both_forms
def test_meta(causal: bool) -> None:
    x = [torch.empty(2, 4, 37, d, device="meta", requires_grad=True) for d in (5, 5, 7)]
    out, state = linear_attention(*x, "taylor", causal=causal, return_state=True)
    assert out.shape == (2, 4, 37, 7)
    assert out.device.type == "meta"
    assert state.kv.shape == (2, 4, 21, 7)
    assert [g.shape for g in torch.autograd.grad(out.sum(), x)] == [t.shape for t in x]


def test_autocast_and_inference_mode() -> None:
    q, k, v = inputs(5, (2,), 300, 5, 7, grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = linear_attention(q, k, v, "taylor", causal=True)
        half = [x.detach().bfloat16() for x in (q, k, v)]
        same(out.detach(), linear_attention(*half, "taylor", causal=True))
        wide = [x.detach().double() for x in (q, k, v)]
        assert linear_attention(*wide, "taylor").dtype == torch.float64
        out.float().sum().backward()
    assert q.grad is not None
    with torch.inference_mode():
        same(linear_attention(q, k, v, "taylor"), linear_attention(q.detach(), k, v, "taylor"))


# ------------------------------------------------------------------------------------------ memory


def peak(f: Any) -> int:
    """The most bytes held at a time by what f allocates."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        kept = f()
    events = profile.profiler.kineto_results.events()
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())
               if e.name() == "[memory]"]  # fmt: skip
    assert changes
    assert kept is not None
    return int(np.cumsum(changes).max())


@pytest.mark.parametrize("options", [{"order": "linear"}, {"order": "quadratic"}, {"causal": True}])
def test_memory_stays_far_below_the_features(options: dict[str, Any]) -> None:
    """At d = 64 all features of q would be 35 MB; blocks and their sums stay what they are."""
    found, n, d = feature_maps.taylor(), 4096, 64
    features = n * found.width(d) * 4
    x = inputs(1, (), n, d, d, grad=True)
    with torch.no_grad():
        forwards = peak(lambda: linear_attention(*x, found, **options))
    assert forwards < 0.25 * features
    out = linear_attention(*x, found, **options)
    g = torch.ones_like(out)
    backwards = peak(lambda: torch.autograd.grad(out, x, g))
    assert backwards < 0.5 * features


def test_memory_of_a_state() -> None:
    found, n, d = feature_maps.taylor(), 4096, 64
    _, k, v = inputs(1, (), n, d, d)
    assert peak(lambda: State.of(k, v, found)) < 0.25 * n * found.width(d) * 4


def test_memory_that_a_gradient_holds() -> None:
    """Inputs and output, and a denominator a row."""
    held: list[Any] = []

    def pack(x: Any) -> Any:
        held.append(x)
        return x

    q, k, v = inputs(11, (2,), 1024, 64, 64, grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = linear_attention(q, k, v, "taylor", causal=True)
    inside = sum(x.numel() * x.element_size() for x in (q, k, v, out))
    assert sum(x.numel() * x.element_size() for x in held) <= 1.01 * inside


def test_as_arrays_have_it() -> None:
    """The same numbers as NumPy's arrays give, to rounding."""
    found = feature_maps.taylor()
    for causal, n in itertools.product((False, True), (100, 700)):
        q, k, v = inputs(n, (2,), n, 5, 7)
        expected, limit = cases.definition(*map(array, (q, k, v)), found, causal=causal)
        for out in (
            linear_attention(q, k, v, found, causal=causal).numpy(),
            linear_attention(*map(array, (q, k, v)), found, causal=causal),
        ):
            cases.close(out, expected, limit, C)
