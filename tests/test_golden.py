"""The oracle, and linear attention itself, against values computed at 50 digits.

See golden/make_golden.py for what a case holds. Inputs are exact in every dtype, so that one
expected output serves them all.

The bound. A product phi_d(q) phi_d(k) v carries the rounding of phi(q), phi(k), itself, of the sum
over D features and of that over n keys: relative to its size at most (D + n + 10) u to first order,
allowing two ulps for each phi. The stored bound adds up these sizes over |denominator|, numerator
and denominator alike; u is that of the precision computed in. Rounding to the dtype of the output
comes on top, and for maps that are computed outside, in the dtype of the input, theirs.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases import DTYPES

from linattn import State, linear_attention, reference

GOLDEN = Path(__file__).parent / "golden"
CASES = json.loads((GOLDEN / "golden.json").read_text())
BY_NAME = {case["name"]: case for case in CASES}


def mirror(x: Any) -> Any:
    return np.concatenate([np.maximum(x, 0), np.maximum(-x, 0)], axis=-1)


def pairs(x: Any) -> Any:
    return (x[..., :, None] * x[..., None, :]).reshape(*x.shape[:-1], x.shape[-1] ** 2)


CALLABLES: dict[str, Callable[[Any], Any]] = {"mirror": mirror, "pairs": pairs}

every_case = pytest.mark.parametrize("name", list(BY_NAME))


def array(entry: dict[str, Any], dtype: Any = np.float64) -> Any:
    return np.array(entry["data"]).reshape(entry["shape"]).astype(dtype)


class Case:
    """A golden case with its arrays in a dtype."""

    def __init__(self, name: str, dtype: Any = np.float64) -> None:
        case = BY_NAME[name]
        self.q, self.k, self.v = (array(case[x], dtype) for x in "qkv")
        self.map = CALLABLES.get(case["feature_map"], case["feature_map"])
        self.signed = case["feature_map"] in ("identity", "pairs")
        self.out, self.bound = array(case["out"]), array(case["bound"])
        self.final = case["final"]
        self.state = case["state"] and {
            key: entry and array(entry, np.int32 if key == "log_scale" else np.float64)
            for key, entry in case["state"].items()
        }
        self.earlier = case["earlier"] and tuple(array(case["earlier"][x], dtype) for x in "kv")
        self.eps = case["eps"]
        self.options: dict[str, Any] = {
            "causal": case["causal"],
            "key_mask": case["key_mask"] and array(case["key_mask"], bool),
            "cu_seqlens": case["cu_seqlens"],
            "enable_gqa": case["enable_gqa"],
            "normalize": case["normalize"],
        }
        kv = self.final["kv"]["shape"]
        self.D = kv[-2]
        self.terms = self.D + self.k.shape[-2] + (4 if self.earlier else 0) + 10

    def sums(self, oracle: Any) -> Any:
        """The sums of earlier keys, as the oracle takes them."""
        if self.state:
            return (self.state["kv"], self.state["k_sum"], self.state["log_scale"])
        if self.earlier:
            k, v = self.earlier
            return oracle(self.q[..., :0, :], k, v, self.map, return_state=True)[1]
        return None

    def state_of(self, dtype: Any) -> State | None:
        """The same as a State."""
        if self.state:
            return State.from_arrays(**self.state, feature_map=self.map, dtype=dtype)
        if self.earlier:
            return State.of(*self.earlier, self.map)
        return None

    def check(self, out: Any, dtype: Any, tail: str = "") -> None:
        """out equals the golden output within the bound."""
        assert out.dtype == dtype
        assert out.shape == self.out.shape
        info = ml_dtypes.finfo(dtype)
        worked = min(float(info.eps), float(np.finfo(np.float32).eps)) / 2
        allowed = self.terms * worked * self.bound
        if dtype != np.float64:
            allowed += float(info.eps) / 2 * np.abs(self.out)
        if callable(self.map):
            allowed += float(info.eps) * self.bound
        allowed += float(info.smallest_subnormal)
        error = np.abs(out.astype(np.float64) - self.out)
        assert (error <= allowed).all(), f"{(error / allowed).max():.3g} of the bound {tail}"

    def check_state(self, state: Any, unit: float) -> None:
        """The sums (kv, k_sum, log_scale) equal the golden ones; unit: of the precision."""
        kv, k_sum, log_scale = state
        # Sizes: the same sums of absolute values.
        size = Case.__new__(Case)
        size.__dict__.update(self.__dict__)
        if self.state:
            size.state = {**self.state, "kv": np.abs(self.state["kv"])}
            size.state["k_sum"] = np.abs(self.state["k_sum"])
        if self.earlier:
            size.earlier = (self._size(self.earlier[0]), np.abs(self.earlier[1]))
        _, (kv_size, sum_size, power) = reference.double_sum(
            self.q,
            self._size(self.k),
            np.abs(self.v),
            self.map,
            **self.options,
            state=size.sums(reference.double_sum),
            return_state=True,
        )
        power = np.zeros(k_sum.shape, int) if power is None else power
        log_scale = np.zeros(k_sum.shape, int) if log_scale is None else log_scale

        def check(found: Any, mine: Any, golden: dict[str, Any], sizes: Any, scale: Any) -> None:
            pair = np.array(golden["data"], dtype=float).reshape(*golden["shape"], 2)
            expected = times(pair[..., 0], pair[..., 1].astype(int) - scale)
            assert found.shape == expected.shape
            error = np.abs(times(found, mine - scale) - expected)
            assert (error <= self.terms * unit * sizes).all()

        deep = power[..., None]
        check(kv, log_scale[..., None], self.final["kv"], kv_size, deep)
        check(k_sum, log_scale, self.final["k_sum"], sum_size, power)

    def _size(self, k: Any) -> Any:
        return np.abs(k) if self.signed else k


def times(x: Any, power: Any) -> Any:
    """x 2^power"""
    return np.ldexp(x, np.clip(power, -5000, 5000).astype(np.int32))


def test_inputs_are_the_same_in_every_dtype() -> None:
    for name in BY_NAME:
        exact = Case(name)
        for dtype in DTYPES.values():
            case = Case(name, dtype)
            for x in "qkv":
                assert (getattr(case, x).astype(np.float64) == getattr(exact, x)).all()


@pytest.mark.slow
def test_the_file_is_what_its_script_computes() -> None:
    script = GOLDEN / "make_golden.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# The oracle


@every_case
@pytest.mark.parametrize("oracle", [reference.double_sum, reference.recurrence])
def test_reference(name: str, oracle: Any) -> None:
    case = Case(name)
    out, state = oracle(
        case.q,
        case.k,
        case.v,
        case.map,
        case.eps,
        **case.options,
        state=case.sums(oracle),
        return_state=True,
    )
    case.check(out, np.dtype(np.float64))
    case.check_state(state, 2.0**-53)


@every_case
def test_error_bound(name: str) -> None:
    case = Case(name)
    bound = reference.error_bound(
        case.q,
        case.k,
        case.v,
        case.map,
        case.eps,
        **case.options,
        state=case.sums(reference.double_sum),
    )
    if case.earlier:  # what cancelled among the earlier values is not in their sums
        assert (bound <= case.bound * (1 + 1e-6)).all()
        k, v = case.earlier
        if case.options["causal"]:
            return
        k, v = np.concatenate([k, case.k], -2), np.concatenate([v, case.v], -2)
        bound = reference.error_bound(case.q, k, v, case.map, case.eps, **case.options)
    assert np.allclose(bound, case.bound, rtol=1e-6, atol=1e-300)


def test_reference_takes_every_dtype() -> None:
    for dtype in DTYPES.values():
        case = Case("elu1 causal", dtype)
        out = reference.double_sum(case.q, case.k, case.v, causal=True)
        case.check(out, np.dtype(np.float64))


# Linear attention


@every_case
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_linear_attention(name: str, dtype: str, either_backend: str) -> None:
    kind = DTYPES[dtype]
    case = Case(name, kind)
    state = case.state_of(kind)
    orders = ["auto", "linear"]
    if state is None and not case.options["causal"]:
        orders.append("quadratic")
    for order in orders:
        out = linear_attention(
            case.q,
            case.k,
            case.v,
            case.map,
            case.eps,
            **case.options,
            state=state,
            order=order,  # type: ignore[arg-type]
        )
        case.check(out, kind, f"in {order} order")
    out, state = linear_attention(
        case.q, case.k, case.v, case.map, case.eps, **case.options, state=state, return_state=True
    )
    case.check(out, kind, "with return_state")
    unit = 2.0**-53 if kind == np.float64 else 2.0**-24
    if callable(case.map):
        unit += float(ml_dtypes.finfo(kind).eps)
    case.check_state((state.kv, state.k_sum, state.log_scale), unit)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, case in BY_NAME.items()
        if case["causal"] and case["key_mask"] is None and case["cu_seqlens"] is None
    ],
)
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_steps(name: str, dtype: str, either_backend: str) -> None:
    """One token at a time, from the same start."""
    kind = DTYPES[dtype]
    case = Case(name, kind)
    state = case.state_of(kind)
    if state is None:
        batch = tuple(BY_NAME[name]["key_batch"])
        state = State.zeros(batch, case.D, case.v.shape[-1], case.map, dtype=kind)
    rows = []
    for t in range(case.q.shape[-2]):
        q, k, v = (x[..., t : t + 1, :] for x in (case.q, case.k, case.v))
        shared = {x: case.options[x] for x in ("enable_gqa", "normalize")}
        rows.append(state.step(q, k, v, case.eps, **shared))
    case.check(np.concatenate(rows, axis=-2), kind)
