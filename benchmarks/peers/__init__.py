"""Other people's implementations, each an adapter that may be absent.

A peer is a module here that imports its package at the top: `load` gives the module, or None with
a word on what to install.
"""

from __future__ import annotations

import importlib
from types import ModuleType

PACKAGES = {"ggml": "ggml-python", "sdpa": "torch"}


def load(name: str) -> ModuleType | None:
    """The adapter, or None where its package is missing."""
    try:
        return importlib.import_module(f"peers.{name}")
    except (ImportError, OSError) as error:  # not installed, or without its shared library
        print(f"note: skipped {name} ({error}); to compare: pip install {PACKAGES[name]}")
        return None
