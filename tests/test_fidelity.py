"""`linattn.fidelity`: its figures against the definitions, the command, a real model's layers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import inputs
from test_examples import EXAMPLES, example, needs_weights

from linattn import feature_maps, fidelity, plan, softmax_attention

Array = Any


def small() -> Array:
    return inputs(1, (2, 3), 23, 5, 7, np.float64)


@pytest.mark.parametrize("causal", [False, True])
def test_figures(causal: bool) -> None:
    """Row by row, with loops."""
    q, k, v = small()
    found = fidelity(q, k, v, ["elu1"], causal=causal, rows=23)
    assert (found.n_q, found.n_k, found.d_k, found.d_v, found.heads, found.rows) == (
        23, 23, 5, 7, 6, 23,
    )  # fmt: skip
    sums = dict.fromkeys(("kl", "total_variation", "entropy", "largest", "soft"), 0.0)
    phi_q, phi_k = feature_maps.elu1(q), feature_maps.elu1(k)
    off = size = 0.0
    for b in np.ndindex(2, 3):
        for i in range(23):
            n = i + 1 if causal else 23
            p = np.exp(k[b][:n] @ q[b][i] / math.sqrt(5))
            w = phi_k[b][:n] @ phi_q[b][i] + 1e-6 / n
            p, w = p / p.sum(), w / w.sum()
            sums["kl"] += float((p * np.log(p / w)).sum())
            sums["total_variation"] += float(np.abs(p - w).sum() / 2)
            sums["entropy"] -= float((w * np.log(w)).sum())
            sums["soft"] -= float((p * np.log(p)).sum())
            sums["largest"] += float(w.max())
            off += float(((w @ v[b][:n] - p @ v[b][:n]) ** 2).sum())
            size += float(((p @ v[b][:n]) ** 2).sum())
    m = found.maps[0]
    for name in ("kl", "total_variation", "entropy", "largest"):
        assert getattr(m, name) == pytest.approx(sums[name] / (6 * 23), rel=1e-5)
    assert found.softmax.entropy == pytest.approx(sums["soft"] / (6 * 23))
    assert m.error == pytest.approx(math.sqrt(off / size), rel=1e-5)
    assert (m.name, m.D, m.seconds, m.negative) == ("elu1", 5, None, 0.0)
    assert m.operations == plan(23, 23, 5, 7, causal=causal).cost.operations
    exact = found.softmax
    assert exact.error == exact.kl == exact.total_variation == 0
    assert exact.cosine == pytest.approx(1)
    assert exact.monotone == pytest.approx(1)


def test_monotone() -> None:
    """The rank correlation: 1 for weights that rise with q . k, -1 for those that fall."""
    x = np.linspace(1, 2, 9)[:, None]
    found = fidelity(x, x, x, ["relu", lambda x: np.concatenate([x * 0 + 9, 0.5 - x], -1)])
    assert [round(m.monotone, 9) for m in found.maps] == [1.0, 1.0]
    found = fidelity(x, x, x, [lambda x: np.concatenate([x * 0 + 1, 0.1 / x], -1)])
    assert round(found.maps[0].monotone, 9) == -1.0
    from linattn.fidelity import _correlation, _ranks  # type: ignore[attr-defined]

    assert _ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [2.5, 0.0, 2.5, 1.0]
    assert _correlation(np.array([0.0, 1, 2]), np.array([2.0, 1, 0])) == pytest.approx(-1)


def test_every_map_of_the_catalogue() -> None:
    q, k, v = small()
    found = fidelity(q, k, v, measure=True)
    assert len({m.name for m in found.maps}) == len(found.maps) > 20
    for m in found.maps:
        assert math.isfinite(m.error)
        assert m.seconds > 0  # type: ignore[operator]
        assert (m.kl is None) <= (m.negative > 0 or "relu" in m.name or "dpfp" in m.name
                                  or "cosformer" in m.name or "rfa" in m.name)  # fmt: skip
    text = str(found)
    assert text.splitlines()[2].split()[-1] == "ms"
    assert json.loads(json.dumps(found.json()))["maps"][0]["name"] == "elu1"


def test_errors() -> None:
    q, k, v = small()
    with pytest.raises(ValueError, match="rows: expected at least 1, got 0"):
        fidelity(q, k, v, rows=0)
    with pytest.raises(ValueError, match="feature_map: expected one of"):
        fidelity(q, k, v, ["sofmax"])
    far = np.broadcast_to(k[..., :1, :], (2, 3, 5000, 5))
    with pytest.raises(ValueError, match="k: expected 1 to 4096 positions, got 5000"):
        fidelity(q, far, far)


def test_command(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("typer")
    pytest.importorskip("matplotlib")
    from linattn.cli import main

    for name, x in zip("qkv", small(), strict=True):
        np.save(tmp_path / f"{name}.npy", x)
    files = [str(tmp_path / f"{name}.npy") for name in "qkv"]
    picture = tmp_path / "picture.svg"
    maps = ["--feature-map", "relu", "--feature-map", "favor(features=8)"]
    assert main(["fidelity", *files, *maps, "--plot", str(picture), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [m["name"] for m in found["maps"]] == ["relu", "favor(features=8)"]
    assert found["heads"] == 6
    assert "favor" in picture.read_text("utf-8")
    assert main(["fidelity", "--n", "16", "--d", "4", *maps, "--measure", "--causal"]) == 0
    assert "causal" in capsys.readouterr().out
    assert main(["fidelity", *maps[:1], "nothing"]) == 1
    assert "got 'nothing'" in capsys.readouterr().err
    assert main(["explain", "--n", "1000", "--d", "64", "--feature-map", "taylor"]) == 0
    assert "D 2,145, closed-form kernel" in capsys.readouterr().out


def test_the_models_layers_follow_each_other(monkeypatch: Any) -> None:
    """The encoder of the example against the same written for one token at a time."""
    monkeypatch.syspath_prepend(EXAMPLES)
    real = example("real_fidelity")
    rng = np.random.default_rng(1)
    words, positions, features, inner, heads, n = 11, 7, 6, 10, 2, 5
    shapes = {
        "embeddings.word_embeddings.weight": (words, features),
        "embeddings.position_embeddings.weight": (positions, features),
        "embeddings.token_type_embeddings.weight": (2, features),
    }
    norms = ["embeddings.LayerNorm"]
    for i in range(2):
        at = f"encoder.layer.{i}"
        sizes = {
            **{f"attention.self.{x}": (features, features) for x in ("query", "key", "value")},
            "attention.output.dense": (features, features),
            "intermediate.dense": (inner, features),
            "output.dense": (features, inner),
        }
        for name, size in sizes.items():
            shapes |= {f"{at}.{name}.weight": size, f"{at}.{name}.bias": size[:1]}
        norms += [f"{at}.attention.output.LayerNorm", f"{at}.output.LayerNorm"]
    for name in norms:
        shapes |= {f"{name}.weight": (features,), f"{name}.bias": (features,)}
    model = real.Model.__new__(real.Model)
    model.w = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    model.heads, model.layers, model.epsilon = heads, 2, 1e-12
    ids = rng.integers(0, words, (1, n))
    layers = list(model(ids))

    def line(x: Array, name: str) -> Array:
        return model.w[f"{name}.weight"] @ x + model.w[f"{name}.bias"]

    def norm(x: Array, name: str) -> Array:
        x = (x - x.mean()) / x.std()
        return x * model.w[f"{name}.weight"] + model.w[f"{name}.bias"]

    w = model.w
    rows = [
        norm(
            w["embeddings.word_embeddings.weight"][ids[0, t]]
            + w["embeddings.position_embeddings.weight"][t]
            + w["embeddings.token_type_embeddings.weight"][0],
            "embeddings.LayerNorm",
        )
        for t in range(n)
    ]
    for i, (q, k, v) in enumerate(layers):
        at = f"encoder.layer.{i}"
        for name, found in (("query", q), ("key", k), ("value", v)):
            for t in range(n):
                parts = np.split(line(rows[t], f"{at}.attention.self.{name}"), heads)
                np.testing.assert_allclose(found[0, :, t], parts, rtol=1e-4, atol=1e-5)
        mixed = softmax_attention(q, k, v)[0]
        after = []
        for t in range(n):
            x = norm(
                rows[t] + line(np.concatenate(list(mixed[:, t])), f"{at}.attention.output.dense"),
                f"{at}.attention.output.LayerNorm",
            )
            y = line(x, f"{at}.intermediate.dense")
            y = np.array([a * (1 + math.erf(a / math.sqrt(2))) / 2 for a in y])
            after.append(norm(x + line(y, f"{at}.output.dense"), f"{at}.output.LayerNorm"))
        rows = after


def test_a_single_map_is_not_a_list() -> None:
    q = np.ones((5, 3))
    for one in ("elu1", feature_maps.elu1, feature_maps.taylor):
        with pytest.raises(TypeError, match=r"maps: expected a list of maps, got .*; pass \["):
            fidelity(q, q, q, one)


@needs_weights
@pytest.mark.real
def test_a_real_model(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    real = example("real_fidelity")
    found = real.report(1, 128, ["elu1", "favor(features=64)", "favor(features=1024)"])
    assert len(found) == 6
    rows = real.mean(found)
    assert rows[2]["total variation"] < rows[1]["total variation"]
    assert 0.3 < rows[0]["error"] < 1.2
    real.draw(str(tmp_path / "p.svg"), rows, "t")
    assert (tmp_path / "p.svg").stat().st_size > 1000
