"""The only room that judges shapes and dtypes, and that words errors.

Every message says: the argument, what was expected, what came, and what to do about it.
"""

from __future__ import annotations

import math
import numbers
import operator
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "FLOATS",
    "Attention",
    "attention",
    "broadcast",
    "choice",
    "dtype",
    "eps",
    "features",
    "flag",
    "keys",
    "output",
    "promoted",
    "queries",
    "size",
]

Array = Any
Shape = tuple[int, ...]

FLOATS = ("float16", "bfloat16", "float32", "float64")
_MAX_WORK: Any = 10_000  # tries of numpy.shares_memory before it counts as shared
_KNOWN: dict[Any, Any] = {}  # dtypes seen to be right: their names take a microsecond each


class StateShape(NamedTuple):
    """What is to be known of a given state: its sums are (*batch, D, d_v)."""

    batch: Shape
    D: int
    d_v: int
    dtype: Any


class Attention(NamedTuple):
    """Arguments that fit each other: data of one dtype in native byte order."""

    q: Array
    k: Array
    v: Array
    key_mask: Array | None
    cu_seqlens: Array | None
    dtype: Any  # of the output
    shape: Shape  # of the output
    groups: int  # query heads for each key head


# Single values


def dtype(name: str, value: Any) -> Any:
    """One of the four floating dtypes, in native byte order."""
    known = _KNOWN.get(value) if isinstance(value, np.dtype) else None
    if known is not None:
        return known
    try:
        found = np.dtype(value)
    except TypeError:
        raise TypeError(f"{name}: expected one of {_list(FLOATS)}, got {value!r}") from None
    if found.name in FLOATS:
        known = found if found.isnative else found.newbyteorder("=")
        if isinstance(value, np.dtype):
            _KNOWN[value] = known
        return known
    if found.kind == "c":
        remedy = f"attention of complex numbers is not defined here: pass {name}.real.astype(...)"
    elif found.kind in "fV":
        remedy = f"convert it first, as in {name}.astype(numpy.float64)"
    else:
        remedy = f"convert it first, as in {name}.astype(numpy.float32)"
    raise TypeError(f"{name}: expected dtype {_list(FLOATS)}, got {found}; {remedy}")


def promoted(*dtypes: Any) -> Any:
    """The narrowest dtype that holds all: float16 with bfloat16 gives float32."""
    best = dtypes[0]
    for other in dtypes[1:]:
        if other is best or other == best:
            continue
        a, b = best.itemsize, other.itemsize
        best = (best if a > b else other) if a != b else np.dtype(np.float32)
    return best


def eps(value: Any, default: float) -> float:
    """A number >= 0; None is the map's default."""
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        if not (isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "fiu"):
            raise TypeError(
                f"eps: expected a number >= 0 or None, got {_what(value)}; it is added to every "
                "denominator alike"
            )
    number = float(value)
    if not 0 <= number < math.inf:
        raise ValueError(f"eps: expected a finite number >= 0, got {number!r}")
    return number


def flag(name: str, value: Any) -> bool:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise TypeError(f"{name}: expected True or False, got {_what(value)}")


def choice(name: str, value: Any, options: Sequence[str]) -> str:
    if isinstance(value, str) and value in options:
        return value
    raise ValueError(f"{name}: expected one of {_list(map(repr, options))}, got {value!r}")


def order(value: Any, causal: bool, state: bool, return_state: bool) -> bool:
    """Whether it can only be linear; a "quadratic" that would be overruled is an error."""
    choice("order", value, ("auto", "linear", "quadratic"))
    forced = "causal=True" if causal else "state=" if state else "return_state=True"
    if not (causal or state or return_state):
        return bool(value == "linear")
    if value == "quadratic":
        raise ValueError(
            f"order: expected 'auto' or 'linear' with {forced}, got 'quadratic': a state is the "
            "linear order's aggregate, and the causal form walks chunks; leave order='auto'"
        )
    return True


def scale(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"scale: expected a number or None (1/sqrt(d_k)), got {_what(value)}")
    if not math.isfinite(value):
        raise ValueError(f"scale: expected a finite number, got {value!r}")
    return float(value)


def size(name: str, value: Any, least: int = 0) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: expected an integer, got {_what(value)}") from None
    if number < least:
        raise ValueError(f"{name}: expected at least {least}, got {number}")
    return number


def shape(name: str, value: Any) -> Shape:
    """A tuple of sizes; a single integer is one axis."""
    try:
        return (size(name, operator.index(value)),)
    except TypeError:
        pass
    try:
        return tuple(size(name, s) for s in value)
    except TypeError:
        raise TypeError(f"{name}: expected a tuple of integers, got {value!r}") from None


# Arrays


def array(name: str, value: Any) -> Array:
    """A floating array (..., n, d)."""
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{name}: expected an array, got a numpy.ma.MaskedArray; pass {name}.data and the "
            "positions to leave out as key_mask (True where a key takes part)"
        )
    if not isinstance(value, np.ndarray):
        module = type(value).__module__.partition(".")[0]
        if module in ("torch", "jax", "jaxlib", "tensorflow", "cupy"):
            raise TypeError(
                f"{name}: expected a numpy array, got {_what(value)}; convert it, as in "
                f"numpy.asarray({name})"
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # older NumPy: ragged lists are a warning
                value = np.asarray(value)
        except (ValueError, Warning) as error:
            raise TypeError(f"{name}: expected an array, got {_what(value)}: {error}") from None
        if value.dtype == object or value.dtype.kind in "USmM":
            raise TypeError(f"{name}: expected an array of numbers, got dtype {value.dtype}")
    elif type(value) is not np.ndarray:
        value = value.view(np.ndarray)
    dtype(name, value.dtype)
    rows(name, value.shape)
    return value


def rows(name: str, shape: Shape) -> None:
    """(..., positions, features) with at least one feature."""
    if len(shape) < 2:
        raise ValueError(
            f"{name}: expected at least two axes (..., positions, features), got shape "
            f"{shape}; a single row is {name}[None, :]"
        )
    if shape[-1] == 0:
        raise ValueError(
            f"{name}: expected at least one feature on the last axis, got shape {shape}"
        )


def converted(value: Array, to: Any) -> Array:
    """The array in this dtype and native byte order; itself where it is so."""
    return value if value.dtype is to else value.astype(to, copy=False)


def broadcast(what: str, **shapes: Shape) -> Shape:
    """The common shape, as numpy.matmul's leading axes; the message names the axis that differs."""
    result: list[int] = []
    width = max(len(s) for s in shapes.values())
    for axis in range(-width, 0):
        sizes = {name: s[axis] for name, s in shapes.items() if len(s) >= -axis}
        wide = [d for d in sizes.values() if d != 1]  # not a set: sizes may be symbols
        if any(d != wide[0] for d in wide):
            listed = ", ".join(f"{name} {s}" for name, s in shapes.items())
            bad = ", ".join(f"{d} in {name}" for name, d in sizes.items() if d != 1)
            raise ValueError(
                f"{what}: expected equal sizes or 1 on each leading axis, got {listed}: axis "
                f"{axis} has {bad}; insert an axis of 1 where it should broadcast"
                + ", or set enable_gqa=True if k and v have fewer heads"
                * ({"q", "k"} <= shapes.keys())
            )
        result.append(wide[0] if wide else 1)
    return tuple(result)


def key_mask(mask: Any, k_shape: Shape) -> Array:
    """Boolean, (n_k,) or k's shape less its last axis with ones allowed."""
    if not isinstance(mask, np.ndarray):
        mask = np.asarray(mask)
    elif type(mask) is not np.ndarray:
        mask = mask.view(np.ndarray)
    if mask.dtype != bool:
        remedy = (
            "key_mask != 0 if it holds 0 and 1, key_mask == 0 if it is added to scores"
            if mask.dtype.kind in "fV"
            else "key_mask.astype(bool) if 1 means that the key takes part"
        )
        raise TypeError(
            f"key_mask: expected a boolean array, True where the key takes part, got dtype "
            f"{mask.dtype}; pass {remedy}"
        )
    mask_shape(mask.shape, k_shape)
    return mask


def mask_shape(got: Shape, k_shape: Shape) -> None:
    """(n_k,) or k's shape less its last axis with ones allowed."""
    n_k, full = k_shape[-2], k_shape[:-1]
    if got == (n_k,):
        return
    if (
        len(got) == len(full)
        and got[-1] == n_k
        and all(m == s or m == 1 for m, s in zip(got, full, strict=True))
    ):
        return
    expected = f"(n_k,) = ({n_k},) or, with ones allowed, {full}"
    message = f"key_mask: expected shape {expected} for k of shape {k_shape}, got {got}"
    missing = len(full) - len(got)
    if got and got[-1] == n_k and missing > 0:
        leading = got[:-1]
        for split in range(len(leading), -1, -1):  # axes of 1 behind the batch, before the heads
            fitted = (*leading[:split], *(1,) * missing, *leading[split:], n_k)
            if all(m in (1, s) for m, s in zip(fitted, full, strict=True)):
                index = ", ".join([":"] * split + ["None"] * missing)
                raise ValueError(f"{message}; pass key_mask[{index}]")
    if len(got) == len(k_shape) and got[-1] == 1:
        raise ValueError(f"{message}; pass key_mask[..., 0]")
    if len(got) >= 2 and got[-1] == n_k and got[-2] == n_k:
        raise ValueError(
            f"{message}; a mask of query-key pairs has no linear form: use causal=True, or a mask "
            "of keys alone"
        )
    if got and got[-1] != n_k:
        raise ValueError(f"{message}; its last axis must have one entry for each of {n_k} keys")
    raise ValueError(f"{message}; give it k's leading axes, or 1 in their place")


def cu_seqlens(value: Any, n: int) -> Array:
    """Integers [0, ..., n], none less than the one before; int64."""
    cuts = np.asarray(value)
    cut_axes(cuts.dtype, cuts.dtype.kind in "iu", cuts.shape, n)
    cuts = np.ascontiguousarray(cuts, dtype=np.int64)
    if cuts[0] != 0 or cuts[-1] != n:
        raise ValueError(
            f"cu_seqlens: expected to run from 0 to the {n} positions, got {cuts[0]} to "
            f"{cuts[-1]}; for lengths use numpy.cumsum([0, *lengths])"
        )
    down = np.nonzero(cuts[1:] < cuts[:-1])[0]
    if down.size:
        i = int(down[0]) + 1
        raise ValueError(
            f"cu_seqlens: expected no entry less than the one before, got {cuts[i - 1]} then "
            f"{cuts[i]} at index {i}"
        )
    return cuts


def cut_axes(dtype: Any, is_integer: bool, shape: Shape, n: int) -> None:
    """A list of integers, at least one."""
    if not is_integer or len(shape) != 1 or shape[0] == 0:
        raise (ValueError if is_integer else TypeError)(
            f"cu_seqlens: expected a list of integers [0, ..., {n}], got dtype {dtype} and "
            f"shape {shape}; for lengths use numpy.cumsum([0, *lengths])"
        )


def output(out: Any, expected: Shape, of: Any, inputs: dict[str, Array | None]) -> Array | None:
    """An array to write into: this shape and dtype, sharing no memory with an input.

    Returns the array that a backend may write into itself, as even its bounds are apart from those
    of the inputs, or None. Of a memory map it is the plain array over the same memory.
    """
    if type(out) not in (np.ndarray, np.memmap):
        remedy = "; pass out.view(numpy.ndarray)" if isinstance(out, np.ndarray) else ""
        raise TypeError(f"out: expected a numpy array, got {_what(out)}{remedy}")
    if out.shape != expected:
        raise ValueError(
            f"out: expected shape {expected}, got {out.shape}; use numpy.empty({expected}, "
            f"numpy.{of.name})"
        )
    if out.dtype != of or not out.dtype.isnative:
        raise TypeError(
            f"out: expected dtype {of.name}, got {out.dtype}; use numpy.empty({expected}, "
            f"numpy.{of.name})"
        )
    if not out.flags.writeable:
        raise ValueError("out: expected a writeable array, got a read-only one; pass out.copy()")
    if out.size and any(d > 1 and s == 0 for d, s in zip(out.shape, out.strides, strict=True)):
        raise ValueError("out: expected distinct elements, got a broadcast view; pass out.copy()")
    apart = True
    for name, value in inputs.items():
        if isinstance(value, np.ndarray) and np.may_share_memory(out, value):
            apart = False
            if _overlap(out, value):
                raise ValueError(
                    f"out: expected memory of its own, got memory shared with {name}; results "
                    f"would be read back as input: pass out=None or a copy of {name}"
                )
    if not apart:
        return None
    return out if type(out) is np.ndarray else out.view(np.ndarray)


def _overlap(a: Array, b: Array) -> bool:
    try:
        return bool(np.shares_memory(a, b, max_work=_MAX_WORK))
    except Exception:  # too hard to prove, whatever that is called in this NumPy
        return True


# Arrays of a front end: what is wrong, in the same words


def unfit(name: str, got: Any, expected: str, remedy: str | None) -> TypeError:
    """remedy: a function that makes one of it, or None."""
    more = "" if remedy is None else f"; convert it, as in {remedy}({name})"
    return TypeError(f"{name}: expected {expected}, got {_what(got)}{more}")


def unfit_dtype(name: str, got: Any, remedy: str) -> TypeError:
    return TypeError(
        f"{name}: expected dtype {_list(FLOATS)}, got {got}; convert it first, as in {remedy}"
    )


def unfit_layout(name: str, got: Any) -> TypeError:
    return TypeError(
        f"{name}: expected a dense tensor, got layout {got}; pass {name}.to_dense(), or the values "
        "of a nested tensor with its offsets as cu_seqlens"
    )


def unfit_mask(got: Any, is_float: bool, remedy: str) -> TypeError:
    if is_float:
        remedy = "key_mask != 0 if it holds 0 and 1, key_mask == 0 if it is added to scores"
    else:
        remedy = f"{remedy} if 1 means that the key takes part"
    return TypeError(
        "key_mask: expected a boolean tensor, True where the key takes part, got dtype "
        f"{got}; pass {remedy}"
    )


def unfit_scale(got: Any) -> TypeError:
    return TypeError(f"log_scale: expected integers, got dtype {got}")


def unfit_state(got: Any, of: str, remedy: str) -> TypeError:
    held = getattr(got, "library", None)
    what = type(got).__name__ if held is None else f"one of {held}"
    return TypeError(
        f"state: expected a State of {of}, as q is one, or None, got {what}; make one with {remedy}"
    )


def differing(what: str, got: dict[str, Any]) -> TypeError | ValueError:
    """Arguments that must share a dtype or a device; nothing is converted silently."""
    names = ", ".join(got)
    listed = ", ".join(f"{name} {value}" for name, value in got.items())
    kind = TypeError if what == "dtype" else ValueError
    return kind(
        f"{names}: expected one {what}, got {listed}; convert with .to(...), which tensors and "
        "states have"
    )


def no_device(device: Any) -> None:
    if device is not None:
        raise ValueError(
            f"device: expected None for numpy arrays, got {device!r}; pass a dtype of torch, as in "
            "dtype=torch.float32, for a state of tensors"
        )


def same_library(ours: str, theirs: str) -> None:
    if ours != theirs:
        raise TypeError(
            f"other: expected a state of {ours}, as this is one, got one of {theirs}; make one "
            "with State.from_arrays of converted sums"
        )


def needs_gradient(what: str, instead: str) -> RuntimeError:
    return RuntimeError(
        f"{what}: works in place, which no gradient can go through, and one is needed here; use "
        f"{instead}, or call it under torch.no_grad()"
    )


def no_out_with_gradient() -> RuntimeError:
    return RuntimeError(
        "out: expected None where a gradient is needed, as what stands in out can't carry one; "
        "leave out=None, or call it under torch.no_grad()"
    )


def mapped_cuts() -> ValueError:
    return ValueError(
        "cu_seqlens: expected one for all that vmap maps over, got a mapped one; pass it with "
        "in_dims=None, or call the function once for each"
    )


def out_matches(got: tuple[Any, ...], expected: tuple[Any, ...], library: str) -> None:
    """(shape, dtype, device) of out."""
    for what, a, b in zip(("shape", "dtype", "device"), got, expected, strict=True):
        if a != b:
            raise (ValueError if what != "dtype" else TypeError)(
                f"out: expected {what} {b}, got {a}; use {library}.empty({expected[0]}, "
                f"dtype={expected[1]}, device={str(expected[2])!r})"
            )


# Whole calls


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    mask: Any = None,
    cuts: Any = None,
    enable_gqa: bool = False,
    causal: bool = False,
    state: StateShape | None = None,
    remedy: str = "pass the earlier keys as a state",
) -> Attention:
    """The arguments of an attention function, checked against each other and made alike."""
    q, k, v = array("q", q), array("k", k), array("v", v)
    lengths(q.shape, k.shape, v.shape, causal=causal, cut=cuts is not None, remedy=remedy)
    if cuts is not None:
        cuts = cu_seqlens(cuts, q.shape[-2])
    if mask is not None:
        mask = key_mask(mask, k.shape)
    shape, groups = fit(
        q.shape, k.shape, v.shape,
        sequences=None if cuts is None else len(cuts) - 1, enable_gqa=enable_gqa, state=state,
    )  # fmt: skip
    kinds = [q.dtype, k.dtype, v.dtype, *([] if state is None else [state.dtype])]
    kind = promoted(*(dtype("q", d) for d in kinds))
    return Attention(
        converted(q, kind), converted(k, kind), converted(v, kind), mask, cuts, kind, shape, groups
    )


def lengths(q: Shape, k: Shape, v: Shape, *, causal: bool, cut: bool, remedy: str = "") -> None:
    """The last two axes of q, k and v against each other."""
    if q[-1] != k[-1]:
        raise ValueError(
            f"q: expected as many features as k on the last axis, got q {q} and k "
            f"{k}: {q[-1]} and {k[-1]}"
        )
    _same_positions(k, v)
    if causal and q[-2] != k[-2]:
        raise ValueError(
            f"causal: expected q and k of equal length, got n_q = {q[-2]} and n_k = "
            f"{k[-2]}, which have no agreed alignment; {remedy}"
        )
    if cut and q[-2] != k[-2]:
        raise ValueError(
            f"cu_seqlens: expected q and k of equal length, got n_q = {q[-2]} and n_k = "
            f"{k[-2]}; it cuts both alike"
        )


def fit(
    q: Shape,
    k: Shape,
    v: Shape,
    *,
    sequences: int | None,
    enable_gqa: bool,
    state: StateShape | None,
) -> tuple[Shape, int]:
    """The shape of the output and the query heads for each key head."""
    shapes = {"k": k[:-2], "v": v[:-2]}
    if state is not None:
        past = state.batch
        if sequences is not None:
            if not past or past[0] != sequences:
                raise ValueError(
                    f"state: expected a leading axis of {sequences} sequences as in "
                    f"cu_seqlens, got batch shape {past}"
                )
            past = past[1:]
        _same_width(v, state.d_v)
        shapes["state"] = past
    held = broadcast("k, v", **shapes)
    if enable_gqa:
        lead, groups = _grouped(q, held, (k, v))
    else:
        lead, groups = broadcast("q, k, v", q=q[:-2], **shapes), 1
    return (*lead, q[-2], v[-1]), groups


def keys(k: Any, v: Any, mask: Any, into: StateShape | None = None) -> tuple[Any, ...]:
    """k, v, key_mask, their dtype and batch shape, for a state to take in."""
    k, v = array("k", k), array("v", v)
    batch = key_shapes(k.shape, v.shape, into)
    if mask is not None:
        mask = key_mask(mask, k.shape)
    kind = promoted(dtype("k", k.dtype), dtype("v", v.dtype))
    return converted(k, kind), converted(v, kind), mask, kind, batch


def key_shapes(k: Shape, v: Shape, into: StateShape | None) -> Shape:
    """The batch shape of keys and values, for a state to take in."""
    _same_positions(k, v)
    batch = broadcast("k, v", k=k[:-2], v=v[:-2])
    if into is not None:
        _same_width(v, into.d_v)
        both = broadcast("k, v", k=k[:-2], v=v[:-2], state=into.batch)
        if both != into.batch:
            raise ValueError(
                f"k, v: expected leading axes that broadcast to the state's {into.batch}, got "
                f"{batch}: a state cannot grow in place; merge it with State.of(k, v)"
            )
    return batch


def queries(q: Any, state: StateShape, enable_gqa: bool) -> tuple[Array, Any, Shape]:
    """q, the dtype and the shape of the output, for a state to answer."""
    q = array("q", q)
    kind = promoted(dtype("q", q.dtype), state.dtype)
    return converted(q, kind), kind, query_shape(q.shape, state, enable_gqa)


def query_shape(q: Shape, state: StateShape, enable_gqa: bool) -> Shape:
    """The shape of the output of a state."""
    if enable_gqa:
        lead, _ = _grouped(q, state.batch, ())
    else:
        lead = broadcast("q", q=q[:-2], state=state.batch)
    return (*lead, q[-2], state.d_v)


def features(name: str, mapped: Any, source: Array, D: int | None) -> Array:
    """What a callable feature map returned for q or k: (..., n, D), floating."""
    what = f"feature_map({name})"
    if not isinstance(mapped, np.ndarray):
        raise TypeError(f"{what}: expected an array back, got {_what(mapped)}")
    mapped = array(what, mapped)
    feature_shape(name, mapped.shape, source.shape, D)
    return mapped


def feature_shape(name: str, mapped: Shape, source: Shape, D: int | None) -> None:
    """(..., n, D) from (..., n, d_k)."""
    what = f"feature_map({name})"
    if mapped[:-1] != source[:-1]:
        raise ValueError(
            f"{what}: expected shape {(*source[:-1], 'D')} back, as a map acts row by row, "
            f"got {mapped}"
        )
    if D is not None and mapped[-1] != D:
        raise ValueError(
            f"{what}: expected {D} features, as the keys or the state have, got {mapped[-1]}"
        )


def sums(
    kv: Any, k_sum: Any, log_scale: Any, exponential: bool
) -> tuple[Array, Array, Array | None]:
    """Copies of the sums of a state: float64, float64, int32 or None."""
    kv, k_sum = np.array(kv, order="C"), np.array(k_sum, order="C")
    for name, x in (("kv", kv), ("k_sum", k_sum)):
        dtype(name, x.dtype)
    if log_scale is not None:
        log_scale = np.array(log_scale, order="C")
        if log_scale.dtype.kind not in "iu":
            raise unfit_scale(log_scale.dtype)
    sum_shapes(kv.shape, k_sum.shape, None if log_scale is None else log_scale.shape, exponential)
    if log_scale is not None:
        log_scale = log_scale.astype(np.int32, copy=False)
    return kv.astype(np.float64, copy=False), k_sum.astype(np.float64, copy=False), log_scale


def sum_shapes(kv: Shape, k_sum: Shape, log_scale: Shape | None, exponential: bool) -> None:
    """(*batch, D, d_v), (*batch, D), and (*batch, D) for exponential maps."""
    if len(kv) < 2 or 0 in kv[-2:]:
        raise ValueError(f"kv: expected shape (*batch, D, d_v), got {kv}")
    if k_sum != kv[:-1]:
        raise ValueError(f"k_sum: expected shape {kv[:-1]} for kv of shape {kv}, got {k_sum}")
    if log_scale is not None:
        if not exponential:
            raise ValueError(
                "log_scale: expected None for a map that is not exponential, got an array; pass "
                "the feature_map that the state was made with"
            )
        if log_scale != k_sum:
            raise ValueError(f"log_scale: expected shape {k_sum} as k_sum has, got {log_scale}")


def same_map(ours: Any, theirs: Any, what: str) -> None:
    if ours is not theirs and ours != theirs:
        raise ValueError(
            f"{what}: expected a state of feature map {ours.name!r}, got one of {theirs.name!r}; "
            "sums of different maps have nothing in common"
        )


def same_sums(what: str, D: int, d_v: int, other_D: int, other_d_v: int) -> None:
    if (D, d_v) != (other_D, other_d_v):
        raise ValueError(
            f"{what}: expected D = {D} and d_v = {d_v}, got D = {other_D} and d_v = {other_d_v}"
        )


def width(k: Shape, D: int) -> None:
    """Features of mapped keys or queries against those of a state."""
    if k[-1] != D:
        raise ValueError(
            f"state: expected D = {k[-1]} features, as the mapped keys and queries have, "
            f"got a state with D = {D}"
        )


def one_position(q: Shape, k: Shape) -> None:
    for name, x in (("q", q), ("k", k)):
        if x[-2] != 1:
            raise ValueError(
                f"{name}: expected one position, shape (..., 1, {x[-1]}), got {x}; for "
                "several at once use linear_attention(..., causal=True, state=state, "
                "return_state=True)"
            )


def _same_positions(k: Shape, v: Shape) -> None:
    if k[-2] != v[-2]:
        raise ValueError(
            f"v: expected one row for each key, got k {k} and v {v}: {k[-2]} and {v[-2]} positions"
        )


def _same_width(v: Shape, d_v: int) -> None:
    if v[-1] != d_v:
        raise ValueError(
            f"v: expected d_v = {d_v} features as the state has, got {v[-1]} in shape {v}"
        )


def _grouped(q: Shape, held: Shape, kv: tuple[Shape, ...]) -> tuple[Shape, int]:
    """The output's leading axes and the query heads for each key head; held: key batch axes."""
    if len(q) < 3 or not held or any(len(x) < 3 for x in kv):
        raise ValueError(
            f"enable_gqa: expected heads on the third axis from the end of q, k and v, got q {q} "
            f"and key batch axes {held}; insert one, as in q[None], or leave enable_gqa=False"
        )
    heads, key_heads = q[-3], held[-1]
    if key_heads == 0 or heads % key_heads:
        raise ValueError(
            f"enable_gqa: expected query heads to be a multiple of key heads, got {heads} and "
            f"{key_heads} (third axis from the end)"
        )
    return (*broadcast("q, k, v", q=q[:-3], k=held[:-1]), heads), heads // key_heads


def _what(value: Any) -> str:
    kind = type(value)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "numpy"):
        name = f"{kind.__module__}.{name}"
    shape = getattr(value, "shape", None)
    return f"{name} of shape {tuple(shape)}" if shape else f"{name} {value!r}"[:80]


def _list(names: Any) -> str:
    names = list(names)
    return ", ".join(names[:-1]) + f" or {names[-1]}"
