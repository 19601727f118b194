"""Other people's implementations, each an adapter that may be absent.

A peer is a module here that imports its package at the top: `load` gives the module, or None with
a word on what to install. Those that compute a whole sequence hold a `PEER`:

    name, version      as tables print them
    omits              what it leaves out of our formula, "" where it computes the same
    forms              of "full" and "causal", those that it has
    side(q, k, v, *, causal=False)       a call to time; q, k, v: (heads, n, d) NumPy arrays
    answer(q, k, v, *, causal=False)     what that call gives, (heads, n, d_v), for the check

and those of one position a class `Step(heads, d)` with `step(q, k, v)`: (heads, d) -> (heads, d).
`_tensors` makes the first of a function of torch's tensors, with gradients; `_check` compares
either with our reference, once, before anything is timed.
"""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

PACKAGES = {
    "chunked": "torch",
    "compiled": "torch",
    "eager": "torch",
    "fast_transformers": "--no-build-isolation pytorch-fast-transformers",
    "ggml": "ggml-python",
    "kornia": "kornia",
    "ort": "onnxruntime onnx",
    "ours": "torch",
    "performer": "performer-pytorch",
    "sdpa": "torch",
}


def load(name: str) -> ModuleType | None:
    """The adapter, or None where its package is missing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some are older than what they import
            return importlib.import_module(f"peers.{name}")
    except (ImportError, OSError) as error:  # not installed, or without its shared library
        print(f"note: skipped {name} ({error}); to compare: pip install {PACKAGES[name]}")
        return None
