"""Trigonometric random features of tensors: exponents with a sign, by torch's operations."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch_cases import DTYPES, array, close, inputs, normal, same  # noqa: E402

from linattn import State, feature_maps, linear_attention  # noqa: E402

Array = Any

PHI = feature_maps.favor(features=32, kind="trigonometric")

both_forms = pytest.mark.parametrize("causal", [False, True])


def phi(x: Any) -> Any:
    """The formula as it stands, without exponents."""
    y = x * x.shape[-1] ** -0.25
    along = y @ PHI.drawn(torch, y)
    waves = torch.cat([along.sin(), along.cos()], -1)
    return waves * ((y * y).sum(-1, keepdim=True) / 2).exp() / math.sqrt(PHI.features / 2)


@pytest.mark.parametrize("dtype", list(DTYPES))
@both_forms
def test_definition(dtype: str, causal: bool) -> None:
    for n in (1, 13, 71):
        q, k, v = inputs(n, (2,), n, 5, 3, DTYPES[dtype])
        out = linear_attention(q, k, v, PHI, causal=causal)
        assert out.dtype == DTYPES[dtype]
        close(out, q, k, v, PHI, causal=causal)


def test_features_are_those_of_arrays() -> None:
    x = normal(1, 7, 5, dtype=torch.float64)
    torch.testing.assert_close(PHI(x), torch.from_numpy(PHI(array(x))), rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(PHI(x), phi(x), rtol=1e-13, atol=1e-15)


@both_forms
@pytest.mark.parametrize("options", [{}, {"key_mask": torch.arange(19) % 4 > 0}], ids=["", "mask"])
def test_gradients(causal: bool, options: dict[str, Any]) -> None:
    """Those of the formula; rows of zeros, at which sines are 0 and their slopes are not, too."""
    x = inputs(2, (2,), 19, 5, 3, torch.float64)
    for t in x[:2]:
        t[:, [0, 4, 7]] = 0.0
    x, y = ([t.clone().requires_grad_() for t in x] for _ in range(2))
    out = linear_attention(*x, PHI, 0.5, causal=causal, **options)
    right = linear_attention(phi(y[0]), phi(y[1]), y[2], "identity", 0.5, causal=causal, **options)
    torch.testing.assert_close(out, right)
    g = normal(3, 2, 19, 3, dtype=torch.float64)
    for a, b in zip(torch.autograd.grad(out, x, g), torch.autograd.grad(right, y, g), strict=True):
        torch.testing.assert_close(a, b)


@both_forms
def test_gradcheck(causal: bool) -> None:
    x = inputs(4, (), 5, 3, 2, torch.float64, grad=True)
    small = feature_maps.favor(features=6, kind="trigonometric")

    def f(*x: Any) -> Any:
        out, state = linear_attention(*x, small, 0.5, causal=causal, return_state=True)
        return out, state.query(x[0], 0.5)

    assert torch.autograd.gradcheck(f, x)
    assert torch.autograd.gradgradcheck(f, x, fast_mode=True)


def test_states() -> None:
    """Prefill, steps and merged parts are one pass; so is a saved state's map."""
    q, k, v = inputs(5, (2,), 23, 5, 3, torch.float64)
    whole = linear_attention(q, k, v, PHI, causal=True)
    _, state = linear_attention(
        *(t[:, :20] for t in (q, k, v)), PHI, causal=True, return_state=True
    )
    assert state.log_scale is not None
    rows = [state.step(*(t[:, i : i + 1] for t in (q, k, v))) for i in range(20, 23)]
    torch.testing.assert_close(torch.cat(rows, 1), whole[:, 20:])
    parts = State.of(k[:, :9], v[:, :9], PHI) + State.of(k[:, 9:], v[:, 9:], PHI)
    torch.testing.assert_close(parts.query(q[:, -1:]), whole[:, -1:])


def test_no_look_ahead() -> None:
    q, k, v = inputs(6, (), 33, 7, 3)
    before = linear_attention(q, k, v, PHI, causal=True)
    for change in (20 * k[-1], torch.full_like(k[-1], torch.nan)):
        k[-1] = change
        same(linear_attention(q, k, v, PHI, causal=True)[:-1], before[:-1])


def test_long_rows_stay_finite() -> None:
    """|y|^2 / 2 = 400, for which exp is no float32."""
    q, k, v = inputs(7, (), 11, 4, 3)
    q, k = (t * 40 / t.norm(dim=-1, keepdim=True) for t in (q, k))
    out = linear_attention(q, k, v, PHI)
    assert torch.isfinite(out).all()
    close(out, q, k, v, PHI)


def test_mapped() -> None:
    x = inputs(8, (2,), 13, 5, 3, torch.float64)
    f = lambda *x: linear_attention(*x, PHI, causal=True)  # noqa: E731
    torch.testing.assert_close(torch.func.vmap(f)(*x), f(*x))
