"""States of tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from torch_cases import array, inputs, same  # noqa: E402

from linattn import State, linear_attention  # noqa: E402

Array = Any

both_maps = pytest.mark.parametrize("name", ["elu1", "exp"])


def equal(a: State, b: State) -> None:
    same(a.kv, b.kv)
    same(a.k_sum, b.k_sum)
    if a.log_scale is not None:
        same(a.log_scale, b.log_scale)
    assert (a.dtype, a.feature_map) == (b.dtype, b.feature_map)


@both_maps
def test_states_are_those_of_arrays(name: str) -> None:
    q, k, v = inputs(1, (2, 3), 37, 5, 7)
    state, right = State.of(k, v, name), State.of(array(k), array(v), name)
    assert isinstance(state, State)
    np.testing.assert_array_equal(state.kv.numpy(), right.kv)
    np.testing.assert_array_equal(array(state.query(q)), right.query(array(q)))
    for a, b in zip(state.query_parts(q), right.query_parts(array(q)), strict=True):
        np.testing.assert_allclose(array(a), b, rtol=1e-6)
    assert "dtype='float32'" not in repr(state)
    assert "float32" in repr(state)
    assert "device='cpu'" in repr(state)


@both_maps
def test_13_prefill_and_steps_are_one_pass(name: str, road: str) -> None:
    q, k, v = inputs(2, (2, 3), 43, 5, 7)
    whole = linear_attention(q, k, v, name, causal=True)
    _, state = linear_attention(
        *(x[..., :37, :] for x in (q, k, v)), name, causal=True, return_state=True
    )
    rows = [state.step(*(x[..., t : t + 1, :] for x in (q, k, v))) for t in range(37, 43)]
    torch.testing.assert_close(torch.cat(rows, -2), whole[..., 37:, :])


@both_maps
def test_14_branches(name: str) -> None:
    q, k, v = inputs(3, (2, 3), 7, 5, 7)
    state, before = State.of(k, v, name), State.of(k, v, name)
    one = [x[..., :1, :] for x in (q, k, v)]
    a, b = state.copy(), state[torch.tensor([0, 1])]
    same(a.step(*one), b.step(*one))
    equal(state, before)
    linear_attention(q, k, v, name, state=state, return_state=True)
    equal(state, before)
    state.reset(0)
    assert (state.k_sum[0] == 0).all()
    equal(state[1], before[1])
    equal(State.zeros((2, 3), 5, 7, name, dtype=torch.float32) + before, before)


@both_maps
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saving(name: str, dtype: str, tmp_path: Path) -> None:
    kind = getattr(torch, dtype)
    _, k, v = inputs(4, (2,), 7, 5, 7, kind)
    state = State.of(k, v, name)
    state.save(tmp_path / "state.npz")
    equal(State.load(tmp_path / "state.npz"), state)
    assert State.load(tmp_path / "state.npz", dtype=torch.float64).dtype == torch.float64
    assert type(State.load(tmp_path / "state.npz", dtype=np.float32)) is State
    equal(State.from_arrays(**state.arrays(), feature_map=name, dtype=kind), state)


def test_in_place_refuses_where_a_gradient_is_needed() -> None:
    q, k, v = inputs(5, (), 1, 5, 7, grad=True)
    state = State.zeros((), 5, 7, dtype=torch.float32)
    for call in (lambda: state.absorb(k, v), lambda: state.step(q, k, v)):
        with pytest.raises(RuntimeError, match=r"linear_attention\(\.\.\., causal=True, state"):
            call()
    with torch.no_grad():
        state.step(q, k, v)


def test_what_does_not_fit() -> None:
    q, k, v = inputs(6, (), 3, 5, 7)
    state = State.of(k, v)
    with pytest.raises(TypeError, match="q, state: expected one dtype"):
        state.query(q.double())
    assert state.to(torch.float64).query(q.double()).dtype == torch.float64
    with pytest.raises(TypeError, match="state: expected a State of numpy arrays"):
        linear_attention(array(q), array(k), array(v), state=state)
    with pytest.raises(TypeError, match="state: expected a State of torch tensors"):
        linear_attention(q, k, v, state=State.of(array(k), array(v)))
    with pytest.raises(TypeError, match="other: expected a state of torch"):
        state.merge(State.of(array(k), array(v)))
    with pytest.raises(ValueError, match="device: expected None for numpy arrays"):
        State.zeros((), 5, 7, device="cpu")
