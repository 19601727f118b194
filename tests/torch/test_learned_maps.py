"""Maps with weights to train: the families' numbers, gradients, and their place in a layer."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not hasattr(torch, "tensor"):  # the folder tests/torch
    pytest.skip("needs torch", allow_module_level=True)

from linattn import State, feature_maps, linear_attention  # noqa: E402
from linattn.torch import (  # noqa: E402
    LinearAttention,
    hedgehog,
    performer_learned,
    t2r,
)

CASES: list[tuple[Any, Any, dict[str, Any]]] = [
    (hedgehog, feature_maps.hedgehog, {}),
    (hedgehog, feature_maps.hedgehog, {"heads": 3, "features": 4}),
    (hedgehog, feature_maps.hedgehog, {"normalise": "halves"}),
    (hedgehog, feature_maps.hedgehog, {"normalise": "joint", "bias": False}),
    (hedgehog, feature_maps.hedgehog, {"heads": 3, "separate": True, "normalise": "joint"}),
    (t2r, feature_maps.t2r, {"features": 7}),
    (t2r, feature_maps.t2r, {"features": 7, "separate": True}),
    (performer_learned, feature_maps.performer_learned, {"features": 16, "scale": 0.5}),
    (performer_learned, feature_maps.performer_learned, {"heads": 3, "bias": True}),
    (performer_learned, feature_maps.performer_learned, {"features": 16, "separate": True}),
]


@pytest.mark.parametrize(("make", "family", "given"), CASES)
def test_numbers_and_gradients(make: Any, family: Any, given: dict[str, Any]) -> None:
    torch.manual_seed(1)
    found = make(5, **given)
    layer = found.project
    with torch.no_grad():
        for p in layer.parameters():
            p += 0.1 * torch.randn_like(p)
    parameters = {name: p.detach().double().numpy() for name, p in layer.named_parameters()}
    more = {name: given[name] for name in ("normalise", "scale") if name in given}
    same = family(**parameters, **more)
    assert (found.kernel, found.nonnegative, found.eps) == (same.kernel, True, same.eps)
    q, k, v = torch.randn(3, 2, 3, 20, 5, dtype=torch.float64)
    for causal in (False, True):
        out = linear_attention(q, k, v, found, causal=causal)
        arrays = (x.numpy() for x in (q, k, v))
        # the parameters are float32, and widened exactly
        np.testing.assert_allclose(
            out.detach().numpy(), linear_attention(*arrays, same, causal=causal), rtol=1e-9
        )
        layer.zero_grad()
        (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum().backward()
        for p in layer.parameters():
            assert torch.isfinite(p.grad).all()
            assert p.grad.abs().max() > 0
    state = State.of(k, v, found)
    np.testing.assert_allclose(
        state.query(q).detach().numpy(), linear_attention(q, k, v, found).detach().numpy(),
        rtol=1e-9,
    )  # fmt: skip


def test_in_a_layer() -> None:
    layer = LinearAttention(12, 3, batch_first=True, feature_map=hedgehog(4, heads=3))
    assert "feature_map_project.weight" in dict(layer.named_parameters())
    x = torch.randn(2, 9, 12)
    layer(x, x, x)[0].sum().backward()
    assert layer.feature_map_project.weight.grad.abs().max() > 0


def test_queries_with_weights_of_their_own_in_a_layer() -> None:
    layer = LinearAttention(12, 3, batch_first=True, feature_map=hedgehog(4, separate=True))
    learned = layer.feature_map_project
    assert torch.equal(learned.weight, learned.query_weight)
    x = torch.randn(2, 9, 12)
    shared, _ = layer(x, x, x)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.feature_map_project.query_weight *= 1.5
    assert not torch.equal(twin(x, x, x)[0], shared)  # the copy's own weights count
    assert torch.equal(layer(x, x, x)[0], shared)
    twin(x, x, x)[0].square().sum().backward()
    for p in (twin.feature_map_project.weight, twin.feature_map_project.query_weight):
        assert p.grad.abs().max() > 0


def test_training_mimics_softmax() -> None:
    """A few steps against softmax's output lower the error of hedgehog."""
    torch.manual_seed(2)
    q, k, v = torch.randn(3, 4, 32, 8)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    found = hedgehog(8)
    optimiser = torch.optim.Adam(found.project.parameters(), 0.03)
    errors = []
    for _ in range(40):
        loss = (linear_attention(q, k, v, found) - exact).square().mean()
        errors.append(float(loss.detach()))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert errors[-1] < 0.7 * errors[0]


def test_positions_of_a_state_of_tensors() -> None:
    cosformer = feature_maps.cosformer(50)
    q, k, v = torch.randn(3, 12, 4, dtype=torch.float64)
    whole = linear_attention(q, k, v, cosformer.at(range(12)), causal=True)
    state = State.of(k[:11], v[:11], cosformer.at(range(11)))
    last = state.at([11]).step(q[11:], k[11:], v[11:])
    np.testing.assert_allclose(last.numpy(), whole[11:].numpy(), rtol=1e-12)
