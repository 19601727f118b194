"""What several test modules share: the backends, the dtypes, the maps, inputs and the one bound."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np

from linattn import FeatureMap, backends, feature_maps, reference
from linattn.backends import native

Array = Any

# ------------------------------------------------------------------------------------- backends

if os.environ.get("LINATTN_TEST_NATIVE"):  # another build of the core, to be tested in its place
    CORE = os.environ["LINATTN_TEST_NATIVE"]
else:
    CORE = "" if native.extension is None else str(native.extension.__file__)


def _build(instruction_set: str) -> Any:
    """A copy of the core that is bound to an instruction set.

    The set is chosen once for a loaded library, so every set needs a copy: the loader takes files
    of different names for different libraries.
    """
    folder = tempfile.mkdtemp()
    try:
        name = f"linattn_{instruction_set or 'any'}._native"
        copy = shutil.copy(CORE, folder)
        before = os.environ.get("LINATTN_ISA")
        if instruction_set:
            os.environ["LINATTN_ISA"] = instruction_set
        try:
            loader = importlib.machinery.ExtensionFileLoader(name, copy)
            spec = importlib.util.spec_from_file_location(name, copy, loader=loader)
            assert spec is not None
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
        finally:
            os.environ.pop("LINATTN_ISA", None)
            if before is not None:
                os.environ["LINATTN_ISA"] = before
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return module


@functools.cache
def build(instruction_set: str) -> Any:
    return _build(instruction_set)


INSTRUCTION_SETS = tuple(build("").instruction_sets()) if CORE else ()
BACKENDS = ("array", *INSTRUCTION_SETS)


@contextmanager
def using(backend: str | None) -> Iterator[None]:
    """Only this backend answers in the block: "array" or an instruction set of the core.

    With None the core answers first and the array backend what it declines, as for users.
    """
    before, known, only = native.extension, native._known, backends._only
    try:
        if backend != "array" and CORE:
            native.extension, native._known = build(backend or INSTRUCTION_SETS[0]), set()
        backends._choose(None if backend is None else "array" if backend == "array" else "native")
        yield
    finally:
        native.extension, native._known = before, known
        backends._choose(only)


# ------------------------------------------------------------------------------ dtypes and maps

DTYPES = {
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
EPSILON = {name: float(ml_dtypes.finfo(dtype).eps) for name, dtype in DTYPES.items()}


def mirror(x: Array) -> Array:
    """relu of x and of -x: a callable with D = 2 d_k that rounds nothing."""
    return np.concatenate([np.maximum(x, 0), np.maximum(-x, 0)], axis=-1)


def both(x: Array) -> Array:
    """x and -x, as the first step of a map: rounds nothing."""
    return np.concatenate([x, -x], axis=-1)


hyperbolic = FeatureMap("hyperbolic", "exp", both, eps=0.0)

MAPS: dict[str, Any] = {name: name for name in feature_maps.names()}
MAPS |= {"mirror": mirror, "hyperbolic": hyperbolic}
CLOSED = {  # maps with a closed form
    found.name: found
    for found in (
        feature_maps.taylor(),
        feature_maps.taylor(packed=False, scale=1.0),
        feature_maps.polynomial(4, offset=0.5),
    )
}
EXPONENTIAL = ("exp", "hyperbolic")
SIGNED = ("identity",)


def width(feature_map: str, d_k: int) -> int:
    return 2 * d_k if feature_map in ("mirror", "hyperbolic") else d_k


# --------------------------------------------------------------------------------------- inputs

# Positions, features of keys, features of values: distinct primes around the edges of chunks (64
# rows), blocks (96, 128, 256), tiles (6 rows) and vectors, with the widths 1, 3, 8, 17, 65 in turn.
SIZES = (
    (1, 1, 1),
    (1, 17, 3),
    (2, 3, 1),
    (5, 8, 17),
    (7, 1, 65),
    (13, 65, 8),
    (61, 17, 65),
    (67, 3, 17),
    (97, 8, 3),
    (127, 65, 1),
    (131, 1, 8),
    (251, 3, 65),
    (257, 17, 8),
    (521, 8, 17),
)


def data(*shapes: Any, seed: int = 0, dtype: Any = np.float64, scale: float = 1.0) -> list[Array]:
    """Normal arrays of these shapes, one after the other from one seed."""
    rng = np.random.default_rng(seed)
    return [(scale * rng.standard_normal(shape)).astype(dtype) for shape in shapes]


def normal(seed: int, *shape: int, dtype: Any = np.float64) -> Array:
    """Normal numbers, rounded to the dtype."""
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def inputs(seed: int, batch: tuple[int, ...], n: int, d_k: int, d_v: int, dtype: Any) -> Array:
    """q, k and v of the same length."""
    return tuple(
        normal(3 * seed + i, *batch, n, d, dtype=dtype) for i, d in enumerate((d_k, d_k, d_v))
    )


# ------------------------------------------------------------------------------------ the bound

C = 2.0
"""Law 1's constant for random inputs: at most 0.7 is seen, at whatever length."""

C_EQUAL = 16.0
"""The same where all terms are equal: then all roundings of a block go the same way."""


def working(dtype: Any) -> Any:
    """The precision that is computed in."""
    return np.dtype(np.float64) if dtype == np.float64 else np.dtype(np.float32)


def allowed(expected: Array, bound: Array, dtype: Any, c: float = C) -> Array:
    """What may lie between an output of this dtype and the definition's value.

    c epsilon bound, in the precision computed in, below whose normal numbers nothing is promised;
    and the rounding to the output's dtype.
    """
    info, work = ml_dtypes.finfo(dtype), np.finfo(working(dtype))
    rounding = 0.5 * float(info.eps) * np.abs(expected)
    # The rounding itself works on a number that is off already.
    error = c * float(work.eps) * bound * (1 + float(info.eps))
    return error + rounding + float(work.tiny) + float(info.smallest_subnormal)


def close(out: Array, expected: Array, bound: Array, c: float = C, what: Any = "") -> None:
    """out equals the float64 values expected within c epsilon bound."""
    assert out.shape == expected.shape, f"shape {out.shape} for {expected.shape} {what}"
    limit = allowed(expected, bound, out.dtype, c)
    found = out.astype(np.float64)
    top = float(ml_dtypes.finfo(out.dtype).max)
    with np.errstate(all="ignore"):
        error = np.abs(found - expected)
        right = error <= limit
        # what overflows the dtype is infinite there
        right |= (np.abs(expected) + limit >= top) & (found == np.copysign(np.inf, expected))
    if not right.all():
        with np.errstate(all="ignore"):
            worst = np.where(right, 0.0, np.where(np.isfinite(error), error / limit, np.inf))
        at = tuple(int(i) for i in np.unravel_index(np.argmax(worst), worst.shape))
        raise AssertionError(
            f"{(~right).sum()} of {right.size} are off, the worst at {at}: {found[at]!r} for "
            f"{expected[at]!r}, {worst[at]:.3g} times what is allowed {what}"
        )


def same_bits(a: Array, b: Array, what: Any = "") -> None:
    """a and b hold the same bits (of NaN: both are NaN)."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape, f"shapes {a.shape} and {b.shape} {what}"
    bits = np.dtype(f"u{a.dtype.itemsize}")
    differ = np.ascontiguousarray(a).view(bits) != np.ascontiguousarray(b).view(bits)
    if a.dtype.kind != "i":
        differ &= ~(np.isnan(a) & np.isnan(b))
    if differ.any():
        where = [tuple(int(i) for i in at) for at in np.argwhere(differ)[:4]]
        raise AssertionError(f"{differ.sum()} of {differ.size} bits differ, first {where} {what}")


def same_states(a: Any, b: Any, what: Any = "") -> None:
    """Two states hold the same bits."""
    same_bits(a.kv, b.kv, what)
    same_bits(a.k_sum, b.k_sum, what)
    assert (a.log_scale is None) == (b.log_scale is None)
    if a.log_scale is not None:
        same_bits(a.log_scale, b.log_scale, what)
    assert a.dtype == b.dtype
    assert a.feature_map == b.feature_map


def definition(
    q: Array, k: Array, v: Array, feature_map: Any, eps: float | None = None, **options: Any
) -> Any:
    """The definition's value and the bound of its error."""
    expected = reference.double_sum(q, k, v, feature_map, eps, **options)
    return expected, reference.error_bound(q, k, v, feature_map, eps, **options)


@functools.lru_cache(maxsize=512)
def case(name: str, dtype: str, n: int, d_k: int, d_v: int, causal: bool) -> Any:
    """q, k, v of two heads, and what the definition gives for them; not to be changed."""
    q, k, v = inputs(n, (2,), n, d_k, d_v, DTYPES[dtype])
    expected, bound = definition(q, k, v, MAPS[name], causal=causal)
    for x in (q, k, v, expected, bound):
        x.flags.writeable = False
    return q, k, v, expected, bound


def splits(n: int, parts: int, seed: int) -> list[slice]:
    """0..n in some pieces of random lengths, empty ones among them."""
    cuts = np.sort(np.random.default_rng(seed).integers(0, n + 1, parts - 1))
    return [slice(int(a), int(b)) for a, b in itertools.pairwise([0, *cuts, n])]
