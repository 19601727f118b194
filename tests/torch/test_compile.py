"""torch.compile, torch.export, the transforms of torch.func, checkpointing, and `opcheck`."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch_cases import inputs, normal, same  # noqa: E402

from linattn import State, feature_maps, linear_attention  # noqa: E402

Array = Any

# What torch itself warns of while it compiles.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*functools.lru_cache.*:UserWarning"),
]


class Module(torch.nn.Module):
    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return linear_attention(q, k, v, causal=True)


class Closed(torch.nn.Module):
    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return linear_attention(q, k, v, "taylor", causal=True)


class Favor(torch.nn.Module):
    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return linear_attention(q, k, v, "favor(features=16)", causal=True)


AXES = ({2: torch.export.Dim("n")},) * 3


def compiled(f: Any) -> Any:
    """The front half of torch.compile and its ahead-of-time gradients; no compiler is needed."""
    torch._dynamo.reset()
    return torch.compile(f, fullgraph=True, dynamic=True, backend="aot_eager")


@pytest.mark.parametrize("name", ["elu1", "exp"])
@pytest.mark.parametrize("causal", [False, True])
def test_compiled_is_eager(name: str, causal: bool) -> None:
    f = compiled(lambda q, k, v: linear_attention(q, k, v, name, causal=causal))
    for n in (37, 13, 131):
        x = inputs(n, (2, 3), n, 5, 7)
        same(f(*x), linear_attention(*x, name, causal=causal))


def test_compiled_gradients() -> None:
    f = compiled(lambda q, k, v, m: linear_attention(q, k, v, key_mask=m, causal=True))
    for n in (37, 13):
        x = inputs(n, (2,), n, 5, 7, grad=True)
        mask = normal(1, n) > 0
        g = normal(2, 2, n, 7)
        found = torch.autograd.grad(f(*x, mask), x, g)
        right = torch.autograd.grad(linear_attention(*x, key_mask=mask, causal=True), x, g)
        for a, b in zip(found, right, strict=True):
            same(a, b)


def test_compiled_once_for_all_lengths() -> None:
    torch._dynamo.reset()
    count = CompileCounterWithBackend("aot_eager")
    f = torch.compile(
        lambda q, k, v: linear_attention(q, k, v, causal=True),
        fullgraph=True, dynamic=True, backend=count,
    )  # fmt: skip
    f(*inputs(37, (2, 3), 37, 5, 7))
    first = count.frame_count
    for n in (13, 131, 257):
        f(*inputs(n, (2, 3), n, 5, 7))
    assert count.frame_count == first > 0


@pytest.mark.parametrize("name", ["elu1", "exp"])
def test_compiled_states(name: str) -> None:
    """A state goes into a compiled function, comes out of one, and is changed by one."""
    q, k, v = inputs(1, (2, 3), 37, 5, 7)
    make = compiled(lambda q, k, v: linear_attention(q, k, v, name, causal=True, return_state=True))
    out, state = make(q, k, v)
    right, expected = linear_attention(q, k, v, name, causal=True, return_state=True)
    assert isinstance(state, State)
    same(out, right)
    same(state.kv, expected.kv)

    def use(q: Any, k: Any, v: Any, state: Any) -> Any:
        further = linear_attention(q, k, v, name, causal=True, state=state)
        one = state.step(q[..., :1, :], k[..., :1, :], v[..., :1, :])
        return further, one, state.absorb(k, v).query(q)

    used = compiled(use)
    for n in (3, 37, 2):
        rows = [x[..., :n, :] for x in (q, k, v)]
        for found, right in zip(used(*rows, state), use(*rows, expected), strict=True):
            same(found, right)
        same(state.kv, expected.kv)
        same(state.k_sum, expected.k_sum)


# ------------------------------------------------------------------------------- maps of families


WEIGHT = np.random.default_rng(0).standard_normal((3, 5))
FAMILIES: dict[str, Any] = {
    "favor": "favor(features=64)",
    "favor, hyperbolic": feature_maps.favor(16, 3, kind="hyperbolic"),
    "favor, trigonometric": "favor(16, kind='trigonometric', orthogonal=False)",
    "rfa": feature_maps.rfa(16, sigma=2.0),
    "relu_random": "relu_random(features=11)",
    "performer_relu": feature_maps.performer_relu(11, 5, False),
    "hedgehog": feature_maps.hedgehog(WEIGHT),
    "hedgehog, tensor": feature_maps.hedgehog(torch.tensor(WEIGHT), normalise="halves"),
    "t2r": feature_maps.t2r(WEIGHT, WEIGHT[:, 0]),
    "performer_learned": feature_maps.performer_learned(WEIGHT),
    "taylor": "taylor",
    "taylor, made": feature_maps.taylor(packed=False),
    "polynomial": "polynomial(degree=3, offset=1.0)",
    "polynomial_sketch": "polynomial_sketch(features=8)",
    "polynomial_sketch, squared": "polynomial_sketch(features=6, squared=True)",
}


@pytest.mark.parametrize("which", FAMILIES)
def test_compiled_families_are_eager(which: str) -> None:
    """Every bit of results and gradients, one graph for all lengths, and nothing left out of it."""
    given = FAMILIES[which]
    torch._dynamo.reset()
    count = CompileCounterWithBackend("aot_eager" if which in ("favor", "hedgehog") else "eager")
    f = torch.compile(
        lambda q, k, v: linear_attention(q, k, v, given, causal=True),
        fullgraph=True, dynamic=True, backend=count,
    )  # fmt: skip
    for n in (37, 13):
        x = inputs(n, (2,), n, 5, 7, grad=True)
        found, right = f(*x), linear_attention(*x, given, causal=True)
        same(found, right)
        g = normal(2, 2, n, 7)
        pairs = zip(torch.autograd.grad(found, x, g), torch.autograd.grad(right, x, g), strict=True)
        for a, b in pairs:
            same(a, b)
    assert count.frame_count == 1


@pytest.mark.parametrize("kind", ["range", "list", "tensor"])
def test_compiled_positions(kind: str) -> None:
    """Of a map that is made outside, and told within the graph where rows stand."""
    cosformer = feature_maps.cosformer(131)
    make = {"range": range, "list": lambda n: list(range(n)), "tensor": torch.arange}[kind]

    def f(q: Any, k: Any, v: Any) -> Any:
        return linear_attention(q, k, v, cosformer.at(make(q.shape[-2])), causal=True)

    g = compiled(f)
    for n in (37, 13):
        x = inputs(n, (2,), n, 5, 7, grad=True)
        same(g(*x), f(*x))


def test_compiled_states_of_families() -> None:
    """Under a name the map is made within the graph, and equal to the state's."""
    name = "favor(features=16, seed=1)"

    def f(q: Any, k: Any, v: Any, state: Any) -> Any:
        return linear_attention(q, k, v, name, causal=True, state=state, return_state=True)

    past = State.of(*inputs(1, (2,), 37, 5, 7)[1:], name)
    g = compiled(f)
    for n in (37, 13):
        x = inputs(n, (2,), n, 5, 7, grad=True)
        (found, after), (right, expected) = g(*x, past), f(*x, past)
        same(found, right)
        same(after.kv, expected.kv)
        same(after.log_scale, expected.log_scale)
        assert after.feature_map == past.feature_map


def test_directions_are_drawn_where_the_graph_runs() -> None:
    """They stand in it as an operator, by their seed; the numbers don't."""
    made = torch.export.export(Favor(), inputs(1, (2, 3), 37, 5, 7), dynamic_shapes=AXES)
    assert "linattn.directions" in made.graph_module.code
    assert not made.constants
    assert all(b.numel() < 2 for b in made.state_dict.values())
    for n in (1, 13):
        x = inputs(n, (2, 3), n, 5, 7, grad=True)
        same(made.module()(*x), Favor()(*x))
    torch.library.opcheck(
        torch.ops.linattn.directions.default, (3, 11, 5, True),
        {"dtype": torch.float32, "device": torch.device("cpu")},
    )  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
def test_compiled_closed_forms_choose_their_order_where_they_run(causal: bool) -> None:
    """One graph for lengths on both sides of the crossover, with the bits of both orders."""
    torch._dynamo.reset()
    count = CompileCounterWithBackend("aot_eager")
    f = torch.compile(
        lambda q, k, v: linear_attention(q, k, v, "taylor", causal=causal),
        fullgraph=True, dynamic=True, backend=count,
    )  # fmt: skip
    for n in (13, 400, 37):
        x = inputs(n, (), n, 3, 3, grad=True)
        found, right = f(*x), linear_attention(*x, "taylor", causal=causal)
        same(found, right)
        g = normal(2, n, 3)
        pairs = zip(torch.autograd.grad(found, x, g), torch.autograd.grad(right, x, g), strict=True)
        for a, b in pairs:
            same(a, b)
    assert count.frame_count == 1


def test_compiled_closed_forms_with_everything() -> None:
    """Grouped heads, a mask, keys that several elements share, states in and out."""

    def f(q: Any, k: Any, v: Any, mask: Any) -> Any:
        given: Any = {"feature_map": "taylor", "causal": True, "enable_gqa": True}
        out, state = linear_attention(q, k, v, key_mask=mask, return_state=True, **given)
        more, state = linear_attention(q, k, v, state=state, return_state=True, **given)
        plain = linear_attention(q, k, v, normalize=False, **given)
        return out + more + plain, state.kv, state.k_sum

    g = compiled(f)
    for n in (37, 13):
        q = normal(1, 3, 4, n, 5).requires_grad_()
        k, v = normal(2, 1, 2, n, 5).requires_grad_(), normal(3, 1, 2, n, 7).requires_grad_()
        mask = normal(4, 1, 1, n) > -0.5
        found, right = g(q, k, v, mask), f(q, k, v, mask)
        for a, b in zip(found, right, strict=True):
            same(a, b)
        pairs = (
            torch.autograd.grad(sum(x.sin().sum() for x in y), (q, k, v)) for y in (found, right)
        )
        for a, b in zip(*pairs, strict=True):
            same(a, b)


def test_compiled_states_of_closed_forms() -> None:
    def f(q: Any, k: Any, v: Any) -> Any:
        state = State.of(k, v, "taylor").absorb(k, v)
        return state.query(q), state.step(q[..., :1, :], k[..., :1, :], v[..., :1, :])

    x = inputs(1, (2,), 13, 5, 7)
    for a, b in zip(compiled(f)(*x), f(*x), strict=True):
        same(a, b)


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    torch._dynamo.reset()
    f = torch.compile(
        lambda q, k, v: linear_attention(q * 2, k, v, causal=True) + 1,
        fullgraph=True, dynamic=True,
    )  # fmt: skip
    for n in (37, 13):
        x = inputs(n, (2, 3), n, 5, 7)
        torch.testing.assert_close(f(*x), linear_attention(2 * x[0], *x[1:], causal=True) + 1)


def test_compiled_before_the_front_end_was_imported() -> None:
    code = (
        "import torch, linattn, sys\n"
        "assert 'linattn.torch' not in sys.modules\n"
        "f = torch.compile(linattn.linear_attention, fullgraph=True, backend='eager')\n"
        "x = torch.ones(2, 3)\n"
        "assert torch.equal(f(x, x, x), linattn.linear_attention(x, x, x))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_export_with_a_length_that_varies() -> None:
    made = torch.export.export(Module(), inputs(1, (2, 3), 37, 5, 7), dynamic_shapes=AXES)
    assert "linattn.attend" in made.graph_module.code
    for length in (1, 13, 131):
        x = inputs(length, (2, 3), length, 5, 7)
        same(made.module()(*x), linear_attention(*x, causal=True))


# ------------------------------------------------------------------------------------- torch.func


@pytest.mark.parametrize("name", ["elu1", "exp", "identity"])
@pytest.mark.parametrize("causal", [False, True])
def test_func_grad(name: str, causal: bool) -> None:
    x = inputs(4, (2,), 37, 5, 7, torch.float64)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return linear_attention(q, k, v, name, 0.1, causal=causal).square().sum()

    found = torch.func.grad(loss, (0, 1, 2))(*x)
    leaves = [t.clone().requires_grad_() for t in x]
    right = torch.autograd.grad(loss(*leaves), leaves)
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["elu1", "exp"])
@pytest.mark.parametrize("causal", [False, True])
def test_func_vmap(name: str, causal: bool) -> None:
    q, k, v = inputs(5, (3,), 37, 5, 7, torch.float64)
    mask = normal(1, 3, 37) > -1

    def one(q: Any, k: Any, v: Any, m: Any) -> Any:
        return linear_attention(q, k, v, name, causal=causal, key_mask=m)

    torch.testing.assert_close(torch.func.vmap(one)(q, k, v, mask), one(q, k, v, mask))
    alone = torch.func.vmap(one, (0, None, None, None))(q, k[0], v[0], mask[0])
    torch.testing.assert_close(alone, one(q, k[0], v[0], mask[0]))

    def loss(q: Any, k: Any, v: Any, m: Any) -> Any:
        return one(q, k, v, m).square().sum()

    each = torch.func.vmap(torch.func.grad(loss, 1))(q, k, v, mask)
    leaf = k.clone().requires_grad_()
    torch.testing.assert_close(each, torch.autograd.grad(loss(q, leaf, v, mask), leaf)[0])


def test_func_of_states() -> None:
    """A state that is made and asked within a transform."""
    q, k, v = inputs(6, (3,), 37, 5, 7, torch.float64)

    def ask(q: Any, k: Any, v: Any) -> Any:
        return State.of(k, v, "exp").query(q)

    torch.testing.assert_close(torch.func.vmap(ask)(q, k, v), ask(q, k, v))


@pytest.mark.parametrize("name", ["elu1", "exp"])
def test_forward_mode(name: str) -> None:
    x = inputs(7, (2,), 19, 3, 5, torch.float64)
    t = inputs(8, (2,), 19, 3, 5, torch.float64)
    out, tangent = torch.func.jvp(lambda *x: linear_attention(*x, name, causal=True), x, t)
    torch.testing.assert_close(out, linear_attention(*x, name, causal=True))
    h = 1e-6
    up, down = (
        linear_attention(*(a + s * h * b for a, b in zip(x, t, strict=True)), name, causal=True)
        for s in (1, -1)
    )
    torch.testing.assert_close(tangent, (up - down) / (2 * h), rtol=1e-6, atol=1e-8)


def test_hessian() -> None:
    q, k, v = inputs(9, (), 5, 2, 3, torch.float64)
    f = lambda k: linear_attention(q, k, v, causal=True).square().sum()  # noqa: E731
    found = torch.func.hessian(f)(k)
    torch.testing.assert_close(found, torch.autograd.functional.hessian(f, k))


def many(f: Any, x: Any, upstream: Any) -> list[Any]:
    """The gradients of f for each of many upstream gradients, one by one."""
    out = f(*x)
    each = [torch.autograd.grad(out, x, g, retain_graph=True) for g in upstream]
    return [torch.stack(of_one) for of_one in zip(*each, strict=True)]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mask": {"key_mask": torch.tensor([True, False, True, True, False, True, True])},
    "masks": {"key_mask": torch.arange(14).reshape(2, 1, 7) % 3 > 0},
    "packed": {"cu_seqlens": torch.tensor([0, 3, 3, 7])},
    "grouped": {"enable_gqa": True},
    "unnormalized": {"normalize": False},
    "state": {"return_state": True},
    "packed states": {"cu_seqlens": torch.tensor([0, 3, 3, 7]), "return_state": True},
}


@pytest.mark.parametrize("name", ["elu1", "exp"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_many_gradients_at_once(options: str, name: str, causal: bool, road: str) -> None:
    """All of a batch of upstream gradients in one pass: three ways to ask for it."""
    given = dict(OPTIONS[options])
    with_state = given.pop("return_state", False)
    heads = 4 if given.get("enable_gqa") else 2
    q = normal(1, 2, heads, 7, 3, dtype=torch.float64).requires_grad_()
    k = normal(2, 2, 2, 7, 3, dtype=torch.float64).requires_grad_()
    v = normal(3, 2, 7, 2, dtype=torch.float64).requires_grad_()
    x: tuple[Any, ...] = (q, k, v)
    if with_state:
        lead = (3,) if "cu_seqlens" in given else ()
        x += (normal(4, *lead, 2, 2, 3, 2, dtype=torch.float64).requires_grad_(),)
        x += (normal(5, *lead, 2, 2, 3, dtype=torch.float64).abs().requires_grad_(),)

    def f(*x: Any) -> Any:
        if not with_state:
            return linear_attention(*x, name, causal=causal, **given)
        scale = torch.zeros_like(x[4], dtype=torch.int32) if name == "exp" else None
        state = State.from_arrays(*x[3:], scale, feature_map=name, dtype=torch.float64)
        out, after = linear_attention(
            *x[:3], name, causal=causal, state=state, return_state=True, **given
        )
        return out + (after[1] if "cu_seqlens" in given else after).query(x[0])

    upstream = normal(6, 5, 2, heads, 7, 2, dtype=torch.float64)
    right = many(f, x, upstream)
    out = f(*x)
    ways = (
        torch.autograd.grad(out, x, upstream, is_grads_batched=True, retain_graph=True),
        torch.func.vmap(lambda g: torch.autograd.grad(out, x, g, retain_graph=True))(upstream),
        torch.func.vmap(torch.func.vjp(f, *x)[1])(upstream),
    )
    for found in ways:
        for a, b in zip(found, right, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("causal", [False, True])
def test_jacobians(causal: bool) -> None:
    x = inputs(15, (2,), 5, 3, 2, torch.float64)
    f = lambda *x: linear_attention(*x, causal=causal)  # noqa: E731
    right = torch.autograd.functional.jacobian(f, x)
    for found in (
        torch.func.jacrev(f, (0, 1, 2))(*x),
        torch.func.jacfwd(f, (0, 1, 2))(*x),
        torch.autograd.functional.jacobian(f, x, vectorize=True),
    ):
        for a, b in zip(found, right, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["elu1", "exp"])
@pytest.mark.parametrize("mapped", ["q", "k", "v", "mask", "state", "qkv", "all"])
def test_the_operator_under_vmap(name: str, mapped: str, road: str) -> None:
    """As it stands in a graph that was exported: any of its arguments, on any axis of them."""
    q, k, v = normal(1, 4, 2, 7, 3), normal(2, 2, 7, 3), normal(3, 7, 2)
    past = linear_attention(*inputs(4, (2,), 5, 3, 2), name, return_state=True)[1]
    given = [q, k, v, normal(5, 7) > -1, past.kv, past.k_sum, past.log_scale]
    which = {"qkv": "q k v", "all": "q k v mask state"}.get(mapped, mapped).split()
    dims: list[int | None] = [None] * 7
    for word in which:
        for i in {"q": [0], "k": [1], "v": [2], "mask": [3], "state": [4, 5, 6]}[word]:
            if given[i] is not None:
                dims[i] = min(i, given[i].ndim)
                copies = [given[i].roll(j, 0) for j in range(5)]
                given[i] = torch.stack(copies, dims[i])

    def f(q: Any, k: Any, v: Any, mask: Any, *sums: Any) -> Any:
        out, kv, k_sum, _ = torch.ops.linattn.attend(
            q, k, v, name, 1e-6, True, mask, None, False, True, *sums, True, "auto"
        )
        return out, kv, k_sum

    found = torch.func.vmap(f, tuple(dims))(*given)
    for j in range(5):
        pairs = zip(given, dims, strict=True)
        one = [x if d is None else x.select(d, j).contiguous() for x, d in pairs]
        for a, b in zip(found, f(*one), strict=True):
            torch.testing.assert_close(a[j], b)


def test_sequences_are_not_mapped_over() -> None:
    q, k, v = inputs(16, (), 7, 3, 2)
    cuts = torch.tensor([[0, 3, 7], [0, 5, 7]])

    def operator(cuts: Any) -> Any:
        return torch.ops.linattn.attend(
            q, k, v, "elu1", 1e-6, True, None, cuts, False, True, None, None, None, False, "auto"
        )[0]

    def function(cuts: Any) -> Any:
        return linear_attention(q, k, v, causal=True, cu_seqlens=cuts)

    for f in (operator, function):
        with pytest.raises(ValueError, match=r"cu_seqlens: expected one for all.*in_dims=None"):
            torch.func.vmap(f)(cuts)


# ------------------------------------------------------------------------------- modes of torch


def test_no_grad_and_inference_mode() -> None:
    x = inputs(10, (2,), 37, 5, 7, grad=True)
    right = linear_attention(*x).detach()
    with torch.no_grad():
        out = linear_attention(*x)
        same(out, right)
        assert not out.requires_grad
    with torch.inference_mode():
        y = inputs(10, (2,), 37, 5, 7)
        out, state = linear_attention(*y, return_state=True)
        same(out, right)
        state.step(*(t[:, :1] for t in y))
        assert out.is_inference()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    x = inputs(11, (2,), 37, 5, 7, grad=True)
    f = lambda *x: linear_attention(*x, causal=True)  # noqa: E731
    g = normal(1, 2, 37, 7)
    right = torch.autograd.grad(f(*x), x, g)
    leaves = [t.detach().clone().requires_grad_() for t in x]
    checkpoint(f, *leaves, use_reentrant=reentrant).backward(g)
    for leaf, b in zip(leaves, right, strict=True):
        same(leaf.grad, b)


def test_meta_and_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = [torch.empty(2, 4, 37, d, device="meta") for d in (5, 5, 7)]
    out, state = linear_attention(*x, "exp", causal=True, return_state=True)
    assert out.shape == (2, 4, 37, 7)
    assert out.device.type == "meta"
    assert state.kv.shape == (2, 4, 5, 7)
    assert state.log_scale.dtype == torch.int32
    with FakeTensorMode():
        x = [torch.empty(2, 4, 37, d) for d in (5, 5, 7)]
        cut = torch.tensor([0, 13, 37])
        out, state = linear_attention(*x, cu_seqlens=cut, return_state=True)
        assert out.shape == (2, 4, 37, 7)
        assert state.kv.shape == (2, 2, 4, 5, 7)


# ---------------------------------------------------------------------------------------- opcheck


@pytest.mark.parametrize("name", ["elu1", "exp"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_opcheck_attend(name: str, causal: bool, with_state: bool) -> None:
    q, k, v = inputs(12, (2, 3), 13, 5, 7, grad=True)
    state = State.of(k.detach(), v.detach(), name)
    sums = (state.kv.requires_grad_(), state.k_sum.requires_grad_(), state.log_scale)
    torch.library.opcheck(
        torch.ops.linattn.attend.default,
        (
            q, k, v, name, 1e-6, causal, normal(1, 13) > 0, None, False, True,
            *(sums if with_state else (None, None, None)), with_state, "auto",
        ),
    )  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
def test_opcheck_attend_backward(causal: bool) -> None:
    q, k, v = inputs(13, (2, 3), 13, 5, 7, grad=True)
    out = linear_attention(q, k, v, causal=causal).detach()
    state = (None, None, None)
    torch.library.opcheck(
        torch.ops.linattn.attend_backward.default,
        (
            normal(1, 2, 3, 13, 7).requires_grad_(), None, None, q, k, v, out, "elu1", 1e-6, causal,
            None, None, False, True, *state, *state,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["elu1", "exp"])
def test_opcheck_in_place(name: str) -> None:
    q, k, v = inputs(14, (2, 3), 1, 5, 7)
    state = State.of(k, v, name)
    sums = (state.kv, state.k_sum, state.log_scale)
    torch.library.opcheck(torch.ops.linattn.absorb_.default, (*sums, k, v, name, None))
    torch.library.opcheck(
        torch.ops.linattn.step_.default, (*sums, q, k, v, name, 1e-6, False, True)
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("with_state", [False, True])
def test_opcheck_closed(causal: bool, with_state: bool) -> None:
    q, k, v = inputs(15, (2, 3), 13, 3, 7, grad=True)
    state = State.of(k.detach(), v.detach(), "taylor")
    sums = (state.kv.requires_grad_(), state.k_sum.requires_grad_())
    args = (
        "taylor", 1e-6, causal, False, not with_state, with_state, "auto", normal(1, 13) > 0, None,
        *(sums if with_state else (None, None)),
    )  # fmt: skip
    torch.library.opcheck(torch.ops.linattn.closed.default, (q, k, v, *args))
    with torch.no_grad():
        q, k, v = (x.detach() for x in (q, k, v))
        args = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in args)
        out, den, *after = torch.ops.linattn.closed.default(q, k, v, *args)
        grads = [torch.ones_like(x) if with_state else None for x in after]
        torch.library.opcheck(
            torch.ops.linattn.closed_backward.default,
            (torch.ones_like(out), *grads, q, k, v, *args, out, den),
        )


def test_opcheck_features() -> None:
    x, name = normal(16, 2, 13, 5).requires_grad_(), "polynomial_sketch(features=8)"
    torch.library.opcheck(torch.ops.linattn.features.default, (x, name, False))
    torch.library.opcheck(
        torch.ops.linattn.features_backward.default, (normal(17, 2, 13, 8), x.detach(), name, True)
    )


def test_export_of_a_closed_form() -> None:
    made = torch.export.export(Closed(), inputs(1, (2, 3), 37, 3, 7), dynamic_shapes=AXES)
    assert "linattn.closed" in made.graph_module.code
    for n in (2, 300):
        x = inputs(n, (2, 3), n, 3, 7)
        same(made.module()(*x), Closed()(*x))
