"""How close feature maps come to softmax attention in every layer of a real model.

all-MiniLM-L6-v2 reads real text (the manual of Python) with softmax attention, in NumPy; at each
layer its queries, keys and values go to `linattn.fidelity`. real_qkv.py tells what is needed.

    python examples/real_fidelity.py --plot docs/assets/fidelity.svg --json build/fidelity.json
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import real_qkv

import linattn

Array = Any

_erf = np.frompyfunc(math.erf, 1, 1)


class Model:
    """The encoder, as its configuration says: attention, then two layers with GELU, six times."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        config = json.loads((folder / "config.json").read_text("utf-8"))
        self.heads: int = config["num_attention_heads"]
        self.layers: int = config["num_hidden_layers"]
        self.epsilon: float = config["layer_norm_eps"]
        with safe_open(folder / "model.safetensors", framework="np") as file:
            self.w = {
                name: file.get_tensor(name) for name in file.keys() if "position_ids" not in name
            }

    def linear(self, x: Array, name: str) -> Array:
        return x @ self.w[f"{name}.weight"].T + self.w[f"{name}.bias"]

    def norm(self, x: Array, name: str) -> Array:
        x = x - x.mean(axis=-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(self.epsilon))
        return x * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def __call__(self, ids: Array) -> Iterator[tuple[Array, Array, Array]]:
        """ids: (windows, n) -> q, k, v: (windows, heads, n, features / heads), layer by layer"""
        w = self.w
        x = w["embeddings.word_embeddings.weight"][ids]
        x = x + w["embeddings.position_embeddings.weight"][: ids.shape[1]]
        x = self.norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
        for i in range(self.layers):
            at = f"encoder.layer.{i}"
            q, k, v = (
                np.swapaxes(y.reshape(*y.shape[:-1], self.heads, -1), -2, -3)
                for y in (
                    self.linear(x, f"{at}.attention.self.{part}")
                    for part in ("query", "key", "value")
                )
            )
            yield q, k, v
            y = np.swapaxes(linattn.softmax_attention(q, k, v), -2, -3).reshape(x.shape)
            y = self.linear(y, f"{at}.attention.output.dense")
            x = self.norm(x + y, f"{at}.attention.output.LayerNorm")
            y = self.linear(x, f"{at}.intermediate.dense")
            y = y * (1 + _erf(y / math.sqrt(2)).astype(np.float32)) / 2
            x = self.norm(x + self.linear(y, f"{at}.output.dense"), f"{at}.output.LayerNorm")


def report(windows: int, length: int, maps: list[str] | None) -> list[linattn.Fidelity]:
    from tokenizers import Tokenizer

    folder = real_qkv.model_folder()
    ids = real_qkv.windows(Tokenizer.from_file(str(folder / "tokenizer.json")), length, windows)
    found = []
    for i, (q, k, v) in enumerate(Model(folder)(ids)):
        found.append(linattn.fidelity(q, k, v, maps, rows=16))
        print(f"layer {i + 1}\n{found[-1]}\n", flush=True)
    return found


def mean(found: list[linattn.Fidelity]) -> list[dict[str, Any]]:
    """Of the layers, map by map, the error as the root of the mean square."""
    rows = []
    for of_layers in zip(*(f.maps for f in found), strict=True):
        first = of_layers[0]
        errors = [m.error for m in of_layers]
        rows.append(
            {
                "map": first.name,
                "D": first.D,
                "operations": first.operations,
                "error": math.sqrt(sum(e * e for e in errors) / len(errors)),
                "least": min(errors),
                "most": max(errors),
                "total variation": sum(m.total_variation for m in of_layers) / len(of_layers),
                "entropy": sum(m.entropy for m in of_layers) / len(of_layers),
                "monotone": sum(m.monotone for m in of_layers) / len(of_layers),
            }
        )
    return rows


def draw(path: str, rows: list[dict[str, Any]], title: str) -> None:
    """The picture of `linattn fidelity`, of the means over layers."""
    from linattn.cli.fidelity import draw_points

    keys = ("map", "operations", "error", "total variation")
    points: Any = [tuple(row[key] for key in keys) for row in rows]
    draw_points(path, points, title)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=4, help="texts (4)")
    parser.add_argument("--length", type=int, default=512, help="tokens of each (512)")
    parser.add_argument("--map", action="append", help="feature maps; may be given many times")
    parser.add_argument("--plot", help="draw the means over layers")
    parser.add_argument("--json", type=Path, help="write everything")
    given = parser.parse_args()
    found = report(given.windows, given.length, given.map)
    rows = mean(found)
    print("over all layers")
    print(f"{'map':<40} {'D':>8} {'Mflop':>8} {'error':>6}   least … most    TV  entropy  monotone")
    for r in rows:
        print(
            f"{r['map']:<40} {r['D']:>8,} {r['operations'] / 1e6:>8,.1f} {r['error']:>6.3f}"
            f"   {r['least']:.3f} … {r['most']:.3f}  {r['total variation']:.3f}"
            f"  {r['entropy']:.2f}  {r['monotone']:.2f}"
        )
    if given.json is not None:
        given.json.write_text(json.dumps({"layers": [f.json() for f in found], "mean": rows}))
    if given.plot is not None:
        draw(given.plot, rows, f"all-MiniLM-L6-v2, {len(found)} layers, n = {given.length}, d = 32")


if __name__ == "__main__":
    main()
