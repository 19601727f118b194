"""Faults of the field, met with tensors; the numbers are those of tests/test_faults.py.

Which test holds the right value of each fault that tensors and gradients can have. Those without a
file stand here.

==  ==================================================================================
 2  test_gradients.py::test_02_gradients_of_long_sums_in_half_precision
 3  test_03_float32_sums_do_not_saturate
 4  test_04_zero_rows, test_04_eps_in_half_precision, test_04_one_meaning_of_eps
 5  test_05_masked_keys_are_as_if_removed
 6  the same, test_06_masked_rows_where_torch_differentiates;
    test_attention.py::test_05_06_19_masked_keys_are_as_if_removed
 7  test_07_fully_masked; test_gradients.py::test_07_fully_masked_rows_have_zero_gradients
 8  test_08_gradients_of_earlier_queries; test_attention.py::test_08_no_look_ahead
11  test_11_causal_lengths_that_differ, test_11_lengths_that_differ
13  test_state.py::test_13_prefill_and_steps_are_one_pass,
    test_gradients.py::test_gradient_of_a_continuation_is_that_of_the_whole
14  test_state.py::test_14_branches, test_14_gradients_of_branches
15  test_gradients.py::test_15_a_common_scale_of_queries_has_no_gradient, test_gradcheck
16  test_gradients.py::test_16_upstream_gradients_of_any_layout
17  test_17_dtypes; test_gradients.py::test_gradcheck
18  test_gradients.py::test_gradcheck
19  test_19_inputs_and_upstream_keep_their_bits;
    test_attention.py::test_05_06_19_masked_keys_are_as_if_removed
20  test_20_random_features_are_drawn_once
22  test_compile.py::test_compiled_is_eager, test_compiled_gradients, test_compiled_states
23  test_attention.py::test_23_masks_of_other_kinds_are_refused
25  test_25_memory_does_not_grow; test_gradients.py::test_memory_that_a_gradient_holds
26  test_26_empty_sequences; test_gradients.py::test_gradcheck_of_options
27  test_27_a_batch_of_one
==  ==================================================================================
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import cases  # noqa: E402
from torch_cases import DTYPES, close, inputs, normal, same  # noqa: E402

from linattn import State, feature_maps, linear_attention  # noqa: E402
from linattn.backends import native  # noqa: E402
from linattn.torch import LinearAttention  # noqa: E402

Array = Any

every_dtype = pytest.mark.parametrize("dtype", list(DTYPES))
both_forms = pytest.mark.parametrize("causal", [False, True])
needs_core = pytest.mark.skipif(native.extension is None, reason="the compiled core is missing")


def leaves(*x: Any) -> tuple[Any, ...]:
    return tuple(t.detach().clone().requires_grad_() for t in x)


# 3 ---------------------------------------------------------------------------------------------


def of_equal_terms(found: Any, exact: float, c: float = cases.C_EQUAL) -> None:
    """All terms are equal, so their roundings add up within a block, and only there."""
    assert abs(found.item() - exact) <= c * 2.0**-23 * exact


def test_03_float32_sums_do_not_saturate(road: str) -> None:
    """Sums over more than 2^24 equal keys, which are one key expanded, and those of gradients."""
    n = 2**24 + 12_345 if road == "native" else 2**20 + 11
    key, value, q = leaves(torch.tensor([[0.1]]), torch.tensor([[1.0]]), torch.tensor([[0.0]]))
    k, v = key.expand(n, 1), value.expand(n, 1)
    out, state = linear_attention(q, k, v, normalize=False, return_state=True)
    phi = 1 + float(torch.tensor(0.1))
    of_equal_terms(out, n * phi)
    of_equal_terms(state.k_sum, n * phi)
    dq, dkey, dvalue = torch.autograd.grad(out, (q, key, value))
    of_equal_terms(dq, n * phi)  # phi'(0) = 1
    of_equal_terms(dkey, n)
    of_equal_terms(dvalue, n * phi)


@needs_core
@pytest.mark.slow
def test_03_float32_sums_do_not_saturate_in_the_causal_form() -> None:
    """The last row sums over all keys; the gradients of the first key, over all queries."""
    n = 2**24 + 12_345
    zero, one = torch.zeros(1, 1), torch.ones(1, 1)
    q, k, v = (x.expand(n, 1).requires_grad_() for x in (zero, torch.tensor([[0.1]]), one))
    out = linear_attention(q, k, v, causal=True, normalize=False)
    phi = 1 + float(torch.tensor(0.1))
    of_equal_terms(out[-1], n * phi)
    of_equal_terms(out[-2], (n - 1) * phi)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), one.expand(n, 1))
    of_equal_terms(dq[-1], n * phi)
    # The 64 positions of a chunk are added one by one to the sum over those behind it, and each
    # may be rounded by half a step.
    of_equal_terms(dk[0], n, 64 / 2)
    of_equal_terms(dv[0], n * phi, 64 / 2)


# 4 ---------------------------------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("eps", [None, 0.0, 1e-6])
def test_04_zero_rows(dtype: str, eps: float | None, road: str) -> None:
    """All of phi(q) or phi(k) is 0: the output is 0, gradients too, and none is NaN."""
    n, kind = 67, DTYPES[dtype]
    positive = normal(1, n, 5, dtype=kind).abs() + 0.5
    v = normal(2, n, 3, dtype=kind)
    for q, k in ((-positive, positive), (positive, -positive), (-positive, -positive)):
        for options in ({}, {"causal": True}, {"order": "linear"}, {"order": "quadratic"}):
            x = leaves(q, k, v)
            out = linear_attention(*x, "relu", eps, **options)
            assert (out == 0).all()
            for g in torch.autograd.grad(out, x, normal(3, n, 3, dtype=kind)):
                assert (g == 0).all()
        assert (State.of(k, v, "relu").query(q, eps) == 0).all()
        state = State.zeros((), 5, 3, "relu", dtype=kind)
        assert (state.step(q[:1], k[:1], v[:1], eps=eps) == 0).all()


@every_dtype
@both_forms
def test_04_zero_rows_among_others(dtype: str, causal: bool, road: str) -> None:
    """Gradients of the rest are what they are without them."""
    kind = DTYPES[dtype]
    q, k, v = inputs(4, (), 37, 5, 3, kind)
    g = normal(5, 37, 3, dtype=kind)
    # One feature at least that two rows share, or a rest is zero itself.
    q, k = (torch.cat([x, x.new_ones(37, 1)], -1) for x in (q, k))
    dead = torch.arange(37) % 4 == 2
    x = leaves(torch.where(dead[:, None], -q.abs(), q), torch.where(dead[:, None], -k.abs(), k), v)
    out = linear_attention(*x, "relu", 0.0, causal=causal)
    assert (out[dead] == 0).all()
    found = torch.autograd.grad(out, x, g)
    y = leaves(*(t[~dead] for t in (q, k, v)))
    rest = linear_attention(*y, "relu", 0.0, causal=causal)
    step = torch.finfo(kind).eps
    torch.testing.assert_close(out[~dead], rest, rtol=8 * step, atol=8 * step)
    for a, b in zip(found, torch.autograd.grad(rest, y, g[~dead]), strict=True):
        assert (a[dead] == 0).all()
        torch.testing.assert_close(a[~dead], b, rtol=16 * step, atol=16 * step)


@every_dtype
@both_forms
def test_04_eps_in_half_precision(dtype: str, causal: bool, road: str) -> None:
    """An eps that is 0 in float16 beside a denominator of its size: it counts all the same."""
    kind, eps = DTYPES[dtype], 2e-8
    assert torch.tensor(eps, dtype=torch.float16) == 0
    x = leaves(*(torch.full((1, 1), y, dtype=kind) for y in (-9.0, -9.0, 1.5)))
    right = 1.5 / (1 + eps / torch.exp(torch.tensor(-18.0, dtype=torch.float64)).item())
    assert 0.6 < right < 0.8 * 1.5
    out = linear_attention(*x, eps=eps, causal=causal)
    step = torch.finfo(kind).eps
    assert out.item() == pytest.approx(right, rel=4 * step)
    dq, _, dv = torch.autograd.grad(out, x)
    assert dv.item() == pytest.approx(right / 1.5, rel=4 * step)
    assert dq.item() == pytest.approx(right * (1 - right / 1.5), rel=8 * step)  # phi' = phi


@every_dtype
def test_04_one_meaning_of_eps(dtype: str, road: str) -> None:
    """It is added to the denominator, which is 1 here."""
    kind = DTYPES[dtype]
    x, v = torch.zeros(1, 1, dtype=kind), torch.ones(1, 1, dtype=kind)
    with_gradient = leaves(x, x, v)
    layer = LinearAttention(1, 1, eps=3.0, dtype=kind)
    with torch.no_grad():
        layer.in_proj_weight.copy_(torch.tensor([[0.0], [0.0], [1.0]]))
        layer.out_proj.weight.fill_(1.0)
    results = [
        linear_attention(x, x, v, eps=3.0, order="linear"),
        linear_attention(x, x, v, eps=3.0, order="quadratic"),
        linear_attention(x, x, v, eps=3.0, causal=True),
        linear_attention(*with_gradient, eps=3.0),
        linear_attention(*with_gradient, eps=3.0, causal=True),
        linear_attention(x, x, v, "exp", 3.0),
        linear_attention(x, x, v, "exp", 3.0, causal=True),
        linear_attention(x, x, v, lambda x: x + 1, 3.0),
        State.of(x, v).query(x, eps=3.0),
        State.zeros((), 1, 1, dtype=kind).step(x, x, v, eps=3.0),
        torch.func.vmap(lambda *x: linear_attention(*x, eps=3.0))(x[None], x[None], v[None])[0],
        layer(v, v, v)[0],
    ]
    assert all(float(out.detach()) == 0.25 for out in results)


# 5, 6, 7 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["elu1", "exp", "identity"])
@pytest.mark.parametrize("poison", [0.0, torch.nan, torch.inf, 1e30])
def test_05_masked_keys_are_as_if_removed(name: str, poison: float, road: str) -> None:
    """Outputs and gradients; those of what is masked are 0."""
    q, k, v = inputs(6, (2,), 67, 5, 3)
    if name == "identity":
        q, k = q.abs(), k.abs()
    mask = normal(7, 67) > -0.3
    g = normal(8, 2, 67, 3)
    y = leaves(q, k[:, mask], v[:, mask])
    rest = linear_attention(*y, name)
    if poison:
        k[:, ~mask], v[:, ~mask] = poison, poison
    x = leaves(q, k, v)
    out = linear_attention(*x, name, key_mask=mask)
    close(out, q, y[1], y[2], name)
    dq, dk, dv = torch.autograd.grad(out, x, g)
    for a, b in zip((dq, dk[:, mask], dv[:, mask]), torch.autograd.grad(rest, y, g), strict=True):
        torch.testing.assert_close(a, b)
    assert (dk[:, ~mask] == 0).all()
    assert (dv[:, ~mask] == 0).all()


@pytest.mark.parametrize("name", ["elu1", "exp", "identity"])
@pytest.mark.parametrize("poison", [0.0, torch.nan])
def test_05_masked_keys_of_the_causal_form(name: str, poison: float, road: str) -> None:
    """Removed with their queries: what is left is a causal call of the others."""
    q, k, v = inputs(9, (2,), 67, 5, 3)
    if name == "identity":
        q, k = q.abs(), k.abs()
    mask = normal(7, 67) > -0.3
    g = normal(8, 2, 67, 3) * mask[:, None]
    y = leaves(*(t[:, mask] for t in (q, k, v)))
    rest = linear_attention(*y, name, causal=True)
    if poison:
        k[:, ~mask], v[:, ~mask] = poison, poison
    x = leaves(q, k, v)
    out = linear_attention(*x, name, causal=True, key_mask=mask)
    torch.testing.assert_close(out[:, mask], rest)
    right = torch.autograd.grad(rest, y, g[:, mask])
    for a, b in zip(torch.autograd.grad(out, x, g), right, strict=True):
        torch.testing.assert_close(a[:, mask], b)
        assert (a[:, ~mask] == 0).all()


@pytest.mark.parametrize("name", ["elu1", "exp", "softplus"])
@both_forms
def test_06_masked_rows_where_torch_differentiates(name: str, causal: bool) -> None:
    """Gradients of torch.func and of gradients are taken through every operation."""
    x = inputs(30, (), 19, 5, 3, torch.float64)
    mask = torch.arange(19) % 4 > 0

    def loss(*x: Any) -> Any:
        return linear_attention(*x, name, causal=causal, key_mask=mask)[mask].square().sum()

    def second(*x: Any) -> Any:
        x = leaves(*x)
        first = torch.autograd.grad(loss(*x), x, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), x)

    ways = (torch.func.grad(loss, (0, 1, 2)), second)
    clean = [way(*x) for way in ways]
    for t in x[1:]:
        t[~mask] = torch.nan
    for way, right in zip(ways, clean, strict=True):
        for a, b in zip(way(*x), right, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["elu1", "exp", "relu"])
@both_forms
@pytest.mark.parametrize("eps", [None, 0.0])
def test_07_fully_masked(name: str, causal: bool, eps: float | None, road: str) -> None:
    q, k, v = inputs(10, (), 70, 5, 3)
    none = torch.zeros(70, dtype=torch.bool)
    for x in ((q, k, v), leaves(q, k, v)):
        out = linear_attention(*x, name, eps, causal=causal, key_mask=none)
        assert (out == 0).all()
    for g in torch.autograd.grad(out, x, normal(11, 70, 3)):
        assert (g == 0).all()


# 8, 11 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["elu1", "exp", "relu"])
@pytest.mark.parametrize("change", ["x20", "nan", "inf"])
def test_08_gradients_of_earlier_queries(name: str, change: str, road: str) -> None:
    """They stay what they are, whatever the last key and value are."""
    for n in (5, 33, 131):
        x = inputs(n, (), n, 7, 3)
        g = normal(11, n, 3)

        def gradient(*x: Any, g: Any = g) -> Any:
            q, k, v = leaves(*x)
            out = linear_attention(q, k, v, name, causal=True)
            return torch.autograd.grad(out, q, g)[0][:-1]

        before = gradient(*x)
        for t in x[1:]:
            t[-1] = t[-1] * 20 if change == "x20" else float(change)
        if change == "x20":
            same(gradient(*x), before)
        else:  # what isn't finite is computed once more in double
            torch.testing.assert_close(gradient(*x), before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("n_q", "n_k"), [(5, 7), (7, 5), (1, 64), (64, 1)])
@pytest.mark.parametrize("grad", [False, True])
def test_11_causal_lengths_that_differ(n_q: int, n_k: int, grad: bool) -> None:
    """They have no one alignment: an error that names the way."""
    q = normal(12, n_q, 3).requires_grad_(grad)
    k, v = normal(13, n_k, 3), normal(14, n_k, 2)
    for call in (linear_attention, torch.compile(linear_attention, backend="eager")):
        with pytest.raises(ValueError, match=r"(?s)causal.*state"):
            call(q, k, v, causal=True)
    if n_k > n_q:  # which is: the keys before the first query as a state
        early = n_k - n_q
        late = (q, k[early:], v[early:])
        out = linear_attention(*late, causal=True, state=State.of(k[:early], v[:early]))
        whole = linear_attention(torch.cat([k[:early], q]), k, v, causal=True)
        torch.testing.assert_close(out, whole[early:])


@pytest.mark.parametrize(("n_q", "n_k"), [(5, 7), (131, 5), (1, 64), (64, 1)])
@pytest.mark.parametrize("name", ["elu1", "exp"])
def test_11_lengths_that_differ(n_q: int, n_k: int, name: str, road: str) -> None:
    """Without `causal` each query sees each key, and each gradient sums over all of the others."""
    q = normal(12, n_q, 3, dtype=torch.float64)
    k, v = (normal(s, n_k, d, dtype=torch.float64) for s, d in ((13, 3), (14, 2)))
    x, y = leaves(q, k, v), leaves(q, k, v)
    out = linear_attention(*x, name)
    close(out, q, k, v, name)
    phi = feature_maps.get(name)
    weights = phi(y[0]) @ phi(y[1]).mT
    eps = phi.eps
    right = weights @ y[2] / (weights.sum(-1, keepdim=True) + eps)
    g = normal(15, n_q, 2, dtype=torch.float64)
    for a, b in zip(torch.autograd.grad(out, x, g), torch.autograd.grad(right, y, g), strict=True):
        torch.testing.assert_close(a, b)


# 14, 17, 19, 20 --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["elu1", "exp"])
def test_14_gradients_of_branches(name: str, road: str) -> None:
    """Two continuations of one state give it the sum of their gradients, and don't change it."""
    _, k, v = inputs(16, (), 7, 5, 3, torch.float64, grad=True)
    root = linear_attention(k.detach(), k, v, name, return_state=True)[1]
    before = [root.kv.clone(), root.k_sum.clone()]
    ends = [inputs(s, (), 5, 5, 3, torch.float64) for s in (17, 18)]
    outs = [linear_attention(*x, name, causal=True, state=root, return_state=True)[0] for x in ends]
    both = torch.autograd.grad(outs[0].sum() + outs[1].sum(), (k, v), retain_graph=True)
    each = [torch.autograd.grad(out.sum(), (k, v), retain_graph=True) for out in outs]
    for a, b, c in zip(both, *each, strict=True):
        torch.testing.assert_close(a, b + c)
    for x, y in zip((root.kv, root.k_sum), before, strict=True):
        same(x.detach(), y.detach())


@every_dtype
@both_forms
def test_17_dtypes(dtype: str, causal: bool, road: str) -> None:
    """None is refused, none is changed, and float64 has digits that float32 has not."""
    kind = DTYPES[dtype]
    x = inputs(19, (2,), 37, 5, 3, kind, grad=True)
    out, state = linear_attention(*x, causal=causal, return_state=True)
    assert out.dtype == kind
    assert state.dtype == kind
    assert state.kv.dtype == state.k_sum.dtype == torch.float64
    assert all(g.dtype == kind for g in torch.autograd.grad(out.sum(), x))
    if kind == torch.float64:
        narrow = linear_attention(*(t.detach().float() for t in x), causal=causal)
        assert not torch.equal(out.detach(), narrow.double())
        close(out, *x, causal=causal)


@both_forms
def test_19_inputs_and_upstream_keep_their_bits(causal: bool, road: str) -> None:
    """Rows of whole vectors, which kernels read where they lie; in the backward pass too."""
    q, k, v = (normal(s, 70, d) for s, d in ((20, 16), (21, 16), (22, 64)))
    k[3], v[5] = torch.nan, torch.inf
    mask = torch.arange(70) % 3 > 0
    mask[[3, 5]] = False
    x = leaves(q, k, v)
    g = normal(23, 70, 64)
    state = State.of(q, v)
    all_given = (*x, mask, g, state.kv, state.k_sum)
    kept = [t.detach().clone() for t in all_given]
    out = linear_attention(*x, causal=causal, key_mask=mask, state=state)
    given = out.detach().clone()
    out.backward(g)
    same(out.detach(), given)
    for t, before in zip(all_given, kept, strict=True):
        cases.same_bits(t.detach().numpy().view("u1"), before.numpy().view("u1"))


@pytest.mark.parametrize(
    "name", ["favor", "favor(kind='hyperbolic')", "rfa", "relu_random", "performer_relu"]
)
def test_20_random_features_are_drawn_once(name: str) -> None:
    """Two calls, two layers, training or not: the same bits, and other ones by a redraw alone."""
    q, k, v = inputs(24, (2,), 19, 6, 3)
    phi = feature_maps.get(name)
    first = linear_attention(q, k, v, phi)
    same(linear_attention(q, k, v, phi), first)
    same(linear_attention(q, k, v, name), first)
    assert not torch.equal(linear_attention(q, k, v, phi.redraw(1)), first)
    layer = LinearAttention(12, 2, batch_first=True, feature_map=name)
    twin = LinearAttention(12, 2, batch_first=True, feature_map=name)
    twin.load_state_dict(layer.state_dict())
    x = normal(25, 2, 19, 12)
    out = layer(x, x, x)[0].detach()
    for again in (layer, layer.eval(), twin):
        same(again(x, x, x)[0].detach(), out)


# 25, 26, 27 ------------------------------------------------------------------------------------


MEMORY = """
    import os
    from pathlib import Path
    import torch
    from linattn import linear_attention

    def peak():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

    def measure(causal, gradients, n):
        q, k, v, g = (torch.empty(n, 64).uniform_(-1, 1) for _ in range(4))

        def run(rows):
            x = [t[rows].detach().requires_grad_(gradients) for t in (q, k, v)]
            out = linear_attention(*x, causal=causal)
            return [out, *(torch.autograd.grad(out, x, g[rows]) if gradients else ())]

        run(slice(4096))  # threads, their stacks and scratch are there from now on
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is held
        before = peak()
        made = run(slice(None))
        return peak() - before - sum(x.nbytes for x in made) // 1024

    for causal in (False, True):
        for gradients in (False, True):
            if os.fork() == 0:  # a process of its own, without another import of torch
                for n in (4096, 65_536):
                    taken = measure(causal, gradients, n)
                    print(int(causal), int(gradients), n, taken, flush=True)
                os._exit(0)
            os.wait()
"""


@needs_core
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads and resets the peak")
def test_25_memory_does_not_grow() -> None:
    """Beyond inputs, outputs and gradients: 2 MiB, and 8 bytes a row for the backward pass.

    A state for each chunk of 64 positions would be 32 MiB for the longer of the two.
    """
    command = [sys.executable, "-c", textwrap.dedent(MEMORY)]
    run = subprocess.run(command, capture_output=True, text=True)
    if "clear_refs" in run.stderr:
        pytest.skip("the peak can't be reset here")
    cases_taken = [[int(x) for x in line.split()] for line in run.stdout.splitlines()]
    assert len(cases_taken) == 8, run.stderr
    for causal, gradients, n, taken in cases_taken:
        most = 2048 + (8 * n >> 10 if gradients else 0)
        assert taken <= most, f"{taken} KiB at {n = }, {causal = }, {gradients = }"


@both_forms
@pytest.mark.parametrize("kind", ["int32", "int64"])
@pytest.mark.parametrize("name", ["elu1", "exp"])
def test_26_empty_sequences(causal: bool, kind: str, name: str, road: str) -> None:
    """Right, empty ones empty; at the ends and in between."""
    q, k, v = inputs(26, (2,), 7, 3, 2)
    cuts = torch.tensor([0, 0, 3, 3, 7, 7], dtype=getattr(torch, kind))
    g = normal(27, 2, 7, 2)
    x = leaves(q, k, v)
    out, state = linear_attention(*x, name, causal=causal, cu_seqlens=cuts, return_state=True)
    found = torch.autograd.grad(out, x, g)
    for a, b in ((0, 3), (3, 7)):
        y = leaves(*(t[:, a:b] for t in (q, k, v)))
        part = linear_attention(*y, name, causal=causal)
        close(out[:, a:b], *y, name, causal=causal)
        for whole, right in zip(found, torch.autograd.grad(part, y, g[:, a:b]), strict=True):
            torch.testing.assert_close(whole[:, a:b], right)
    assert state.kv.shape == (5, 2, 3, 2)
    for i in (0, 2, 4):
        assert (state.kv[i] == 0).all()
        assert (state.k_sum[i] == 0).all()


@both_forms
@pytest.mark.parametrize("n", [7, 131, 1031])
def test_27_a_batch_of_one(causal: bool, n: int, road: str) -> None:
    q, k, v = inputs(28, (2,), n, 5, 3)
    g = normal(29, 2, n, 3)
    x = leaves(q, k, v)
    out = linear_attention(*x, causal=causal)
    found = torch.autograd.grad(out, x, g)
    for rows in (slice(0, 1), 1):
        y = leaves(*(t[rows] for t in (q, k, v)))
        one = linear_attention(*y, causal=causal)
        if n < 1000:  # the definition takes its time
            close(one, *y, causal=causal)
        torch.testing.assert_close(out[rows], one)
        for a, b in zip(found, torch.autograd.grad(one, y, g[rows]), strict=True):
            torch.testing.assert_close(a[rows], b)
