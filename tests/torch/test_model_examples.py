"""The examples that need torch: a model that trains, and a model of others with our attention."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> Any:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


lm = example("train_char_lm")

SMALL = {"batch": 8, "context": 96, "width": 48, "heads": 3, "layers": 2, "tokens": 5}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small gain nothing by more, and on a busy machine torch's threads wait long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def random() -> Any:
    return torch.Generator().manual_seed(3)


def test_both_models_begin_with_the_same_weights() -> None:
    made = lm.models(11, lm.Options(**SMALL))
    softmax, linear = (made[name].state_dict() for name in ("softmax", "linear"))
    assert list(softmax) == list(linear)
    for name, value in softmax.items():
        assert torch.equal(value, linear[name]), name


@pytest.mark.parametrize("name", ["softmax", "linear"])
def test_writing_one_by_one_is_reading_the_whole(name: str, random: Any) -> None:
    """A prompt and steps give the scores of one pass; nothing looks ahead."""
    model = lm.models(11, lm.Options(**SMALL))[name].eval()
    ids = torch.randint(11, (2, 29), generator=random)
    with torch.inference_mode():
        whole = model(ids)
        scores, memories = model.prefill(ids[:, :17], 12)
        found = [scores]
        for t in range(17, 29):
            found.append(model.step(ids[:, t : t + 1], memories))
        torch.testing.assert_close(torch.cat(found, dim=1), whole[:, 16:], rtol=1e-4, atol=1e-4)
        ids[:, 20:] = 0
        torch.testing.assert_close(model(ids)[:, :20], whole[:, :20], rtol=1e-4, atol=1e-4)


def test_text_and_batches(random: Any) -> None:
    data = lm.Data.of("a banana and a bandana " * 10)
    assert "".join(data.alphabet) == " abdn"
    assert len(data.train) == 207 and len(data.rest) == 23
    x, y = lm.batch(data.train, 3, 13, random)
    assert x.shape == y.shape == (3, 13)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert data.write(x[0]) in "a banana and a bandana " * 10


def test_a_short_training(tmp_path: Path, capsys: Any) -> None:
    """Held-out loss, in nats: 4.6 for a guess, 3.2 for knowing the frequencies, under 2.8 after
    60 steps. What linear attention remembers doesn't grow; the cache does."""
    options = lm.Options(
        **SMALL, steps=60, rate=6e-3, lengths=(64, 256), sample=20, plot=tmp_path / "loss.svg"
    )
    found = lm.report(options)
    out = capsys.readouterr().out
    assert "linear writes, after" in out and "training, characters a second" in out
    assert options.plot.read_text("utf-8").lstrip().startswith("<?xml")
    for name, run in found.runs.items():
        assert len(run.batch) == 60 and run.steps[0] == 0 and run.steps[-1] == 60
        assert abs(run.rest[0] - math.log(103)) < 0.5, name
        assert run.rest[-1] < 2.8, name
    assert [w.nbytes for w in found.written["softmax"]] == [
        2 * 4 * 2 * 48 * (length + 5) for length in (64, 256)
    ]
    first, second = (w.nbytes for w in found.written["linear"])
    assert first == second == 2 * 3 * (16 * 16 + 16) * 8  # float64, whatever the length


@pytest.mark.slow
def test_matches_of_loftr(capsys: Any) -> None:
    pytest.importorskip("kornia")
    found = example("loftr").report(240, 320, 1, 0)
    out = capsys.readouterr().out
    assert "10 attention modules exchanged" in out
    assert found["same"]
    assert found["counts"]["kornia"] > 100
    assert found["distance"] < 0.01  # pixels
