"""The compiled core, where it was built: its verbs, or stand-ins that decline every call.

Each verb returns None for what it doesn't take and leaves everything as it was; the caller then
words the error or takes another road. Without the extension every call is declined, the first one
with a notice.

LINATTN_REQUIRE_NATIVE=1 makes a missing extension an ImportError.
"""

from __future__ import annotations

import importlib
import os
import warnings
from types import ModuleType
from typing import Any

from ..feature_maps import FeatureMap, Recipe

__all__ = [
    "REMEDY",
    "VERBS",
    "absorb",
    "attend",
    "attend_backward",
    "extension",
    "fused",
    "know",
    "query",
    "reason",
    "register_torch",
    "step",
    "use",
]

VERBS = ("attend", "absorb", "query", "step", "attend_backward")
REMEDY = (
    "install a C++17 compiler and run `pip install --force-reinstall --no-binary linattn linattn`, "
    "or install a wheel built for this platform"
)

extension: ModuleType | None = None
reason = ""  # why there is no extension

_known: set[int] = set()  # type numbers of bfloat16 that the extension was told


def _declined(*args: Any) -> Any:
    return None


def _missing(*args: Any) -> Any:
    use("declined")
    warnings.warn(
        f"linattn's compiled core is missing ({reason}); the slower array backend serves. To get "
        f"it, {REMEDY}.",
        RuntimeWarning,
        stacklevel=3,
    )
    return None


# Looked up as attributes of this module at each call, so that `use` can exchange them.
attend: Any = _missing
absorb: Any = _missing
query: Any = _missing
step: Any = _missing
attend_backward: Any = _missing


def use(what: str) -> None:
    """Which functions answer: "native", "missing" (a notice first) or "declined"."""
    for verb in VERBS:
        if what == "native":
            globals()[verb] = getattr(extension, verb)
        else:
            globals()[verb] = _missing if what == "missing" else _declined


def know(dtype: Any) -> None:
    """Tell the extension a dtype that NumPy itself doesn't have."""
    if dtype.num < 256 or dtype.num in _known or extension is None:  # NumPy's own are below 256
        return
    if dtype.name == "bfloat16":
        extension.register_bfloat16(dtype.num)
        _known.add(dtype.num)


def fused(found: FeatureMap, x: Any, sides: str = "qk") -> Any:
    """What the verbs take as this map of rows like x: a kernel's name, or one with the projections
    before it. None: `project` comes first.

    sides: which of queries and keys a verb has
    """
    if found.project is None:
        return found.kernel
    if extension is None or not x.shape or x.shape[-1] < 1:
        return None
    d_k = x.shape[-1]
    recipes = [found.recipe(d_k)] if "k" in sides or found.project_queries is None else []
    if "q" in sides and found.project_queries is not None:
        recipes.append(found.query_recipe(d_k))
    made = [_made(recipe, d_k) for recipe in recipes if recipe is not None]
    return (found.kernel, *made) if len(made) == len(recipes) else None


def _made(recipe: Recipe, d_k: int) -> Any:
    """The core's form of it, made once for as long as rows have this width."""
    assert extension is not None
    core = recipe.core
    if core is None or core[0] is not extension or core[1] != d_k:
        r = recipe
        inputs = d_k if r.weight is None else r.weight.shape[-2]
        made = extension.projection(
            inputs, r.weight, r.bias, r.square, r.shift, r.mirrored, r.unit, r.finish, r.amount,
            r.times, r.angles,
        )  # fmt: skip
        recipe.core = core = (extension, d_k, made)
    return core[2]


def register_torch(torch: ModuleType) -> None:
    """Let the verbs take tensors on a CPU like arrays.

    The extension sees neither gradients nor wrappers: who passes a tensor has made sure that it is
    exactly a `torch.Tensor`, strided, needs no gradient and is not being traced.
    """
    if extension is not None:
        extension.register_torch(torch)


def _load() -> None:
    global extension, reason
    try:
        found = importlib.import_module("linattn._native")
    except ImportError as error:
        reason = "it was not built" if isinstance(error, ModuleNotFoundError) else str(error)
        if "LINATTN_ISA" in reason:  # a wish that can't be met; another backend is no answer to it
            raise
        if os.environ.get("LINATTN_REQUIRE_NATIVE", "0") not in ("", "0"):
            raise ImportError(
                f"LINATTN_REQUIRE_NATIVE is set, and linattn's compiled core is missing: {reason}; "
                f"{REMEDY}"
            ) from error
        return
    absent = [verb for verb in VERBS if not hasattr(found, verb)]
    if absent:
        reason = f"it lacks {', '.join(absent)}"
        return
    extension = found
    use("native")


_load()
