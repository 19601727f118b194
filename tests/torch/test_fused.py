"""Projections that the core makes itself, for tensors: where nobody looks on, and there alone."""

import copy
import io

import pytest
import torch

import linattn.torch as front
from linattn import State, feature_maps, linear_attention

torch.manual_seed(3)


def rows(n=65):
    return torch.randn(2, n, 8), torch.randn(2, n, 8), torch.randn(2, n, 3)


MAPS = {
    "favor": lambda: feature_maps.favor(24),
    "hedgehog": lambda: feature_maps.hedgehog(torch.randn(5, 8) / 3, torch.randn(5)),
    "halves": lambda: feature_maps.hedgehog(torch.randn(5, 8) / 3, normalise="halves"),
    "trained": lambda: front.hedgehog(8, 5),
    "trained, queries of their own": lambda: front.hedgehog(8, 5, separate=True, normalise="joint"),
    "softmax": feature_maps.softmax,
    "dpfp": lambda: feature_maps.dpfp(2),
    "performer_relu": lambda: feature_maps.performer_relu(24),
    "rfa": lambda: feature_maps.rfa(256, sigma=2.0),
    "sketch": lambda: feature_maps.polynomial_sketch(32, offset=20.0),
}


@pytest.fixture(params=MAPS)
def found(request):
    return MAPS[request.param]()


def refuse(monkeypatch, found):
    def project(self, x):
        raise AssertionError("features in a tensor of their own")

    if isinstance(found.project, torch.nn.Module):
        monkeypatch.setattr(type(found.project), "forward", project)
    else:
        monkeypatch.setattr(type(found), "project", project)


def test_equals_the_road_with_gradients(found, monkeypatch):
    q, k, v = rows()
    wanted = linear_attention(q.requires_grad_(), k, v, found, causal=True)
    refuse(monkeypatch, found)
    with torch.no_grad():
        got = linear_attention(q, k, v, found, causal=True)
        if found.width(8) is None:
            state = State.zeros(2, 10, 3, found, torch.float32).absorb(k[:, :-1], v[:, :-1])
        else:
            state = State.of(k[:, :-1], v[:, :-1], found)
        last = state.step(q[:, -1:], k[:, -1:], v[:, -1:])
        again = state.query(q[:, -1:])
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(last, got[:, -1:])
    torch.testing.assert_close(again, got[:, -1:])


def test_weights_that_train_get_their_gradient():
    q, k, v = rows()
    found = front.hedgehog(8, 5)
    linear_attention(q, k, v, found, causal=True).sum().backward()
    assert all(p.grad is not None for p in found.project.parameters())
    weight = torch.randn(5, 8, requires_grad=True)
    linear_attention(q, k, v, feature_maps.t2r(weight), order="linear").sum().backward()
    assert weight.grad is not None and weight.grad.abs().sum() > 0


def test_a_hook_on_the_layer_is_called():
    seen = []
    found = front.t2r(8, 5)
    found.project.register_forward_hook(lambda layer, args, out: seen.append(out))
    with torch.no_grad():
        linear_attention(*rows(), found, order="linear")
    assert len(seen) == 2


def test_a_step_of_training_is_seen():
    q, k, v = rows()
    found = front.t2r(8, 5)
    with torch.no_grad():
        first = linear_attention(q, k, v, found, order="linear")
        found.project.weight.neg_()
        second = linear_attention(q, k, v, found, order="linear")
    assert not torch.equal(first, second)


def test_out_is_written():
    q, k, v = rows()
    out = torch.empty(2, 65, 3)
    given = linear_attention(q, k, v, "favor", out=out, order="linear")
    assert given is out
    torch.testing.assert_close(out, linear_attention(q, k, v, "favor", order="linear"))


def test_queries_with_a_layer_of_their_own():
    """Of two modules each makes its own side."""
    q, k, v = rows()
    keys, queries = front.hedgehog(8, 5).project, front.hedgehog(8, 5).project
    torch.nn.init.normal_(queries.weight, std=0.3)
    found = feature_maps.FeatureMap("two", "exp", keys, True, 0.0, queries)
    wanted = linear_attention(q.requires_grad_(), k, v, found, order="linear")
    with torch.no_grad():
        torch.testing.assert_close(linear_attention(q, k, v, found, order="linear"), wanted)


def test_weights_are_converted_once():
    layer = front.t2r(8, 5, separate=True).project
    with torch.no_grad():
        keys, queries = layer.recipe(8), layer.query_recipe(8)
        assert layer.recipe(8) is keys and layer.query_recipe(8) is queries
        layer.weight.data[0, 0] += 1  # which no version of the tensor counts
        assert layer.recipe(8) is not keys and layer.query_recipe(8) is queries
        again = copy.deepcopy(layer)
        assert again.recipe(8) is not layer.recipe(8)
        torch.save(layer, io.BytesIO())
        layer.bfloat16()
        assert layer.query_recipe(8) is not queries


def test_positions_may_be_a_tensor(monkeypatch):
    q, k, v = rows()
    found = feature_maps.cosformer(100)
    wanted = linear_attention(q, k, v, found.at(range(65)), causal=True)
    refuse(monkeypatch, found)
    got = linear_attention(q, k, v, found.at(torch.arange(65)), causal=True)
    torch.testing.assert_close(got, wanted)
