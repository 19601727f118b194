"""ONNX Runtime's `com.microsoft::LinearAttention`, its update rule "linear", on the CPU.

The operator has no feature map and no denominator. A column of ones behind v makes it compute the
denominator too; map, column and division are done outside and not timed. Inputs lie ready in its
packed layout (1, n, heads * d) and are bound, output too, so that a run copies nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
from _common import elu1
from onnx import TensorProto, helper

from linattn import get_num_threads

VERSION = f"ONNX Runtime {onnxruntime.__version__}"


def _session(heads: int, *, past: bool, threads: int) -> onnxruntime.InferenceSession:
    """A model of the operator alone."""
    names = ["query", "key", "value"] + ["past"] * past
    node = helper.make_node(
        "LinearAttention", names, ["out", "state"], domain="com.microsoft", update_rule="linear",
        scale=1.0, q_num_heads=heads, kv_num_heads=heads,
    )  # fmt: skip
    axes = {"past": ("1", "h", "d", "m"), "state": ("1", "h", "d", "m")}

    def value(name: str) -> Any:
        shape = [None] * len(axes.get(name, "bnf"))
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    graph = helper.make_graph(
        [node], "one", [value(x) for x in names], [value("out"), value("state")]
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Its idle threads would spin into the next side's turn, as others' do not. With spinning a pass
    # takes as long.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def _packed(x: Any) -> Any:
    """(heads, n, f) -> (1, n, heads * f)."""
    return np.ascontiguousarray(x.swapaxes(0, 1)).reshape(1, x.shape[1], -1)


def _with_ones(v: Any) -> Any:
    return np.concatenate([v, np.ones_like(v[..., :1])], axis=-1)


def _divided(out: Any, heads: int, eps: float = 1e-6) -> Any:
    """(1, n, heads * (d_v + 1)) -> (heads, n, d_v)."""
    parts = out.reshape(out.shape[1], heads, -1).swapaxes(0, 1)
    return parts[..., :-1] / (parts[..., -1:] + eps)


class _Bound:
    """A session whose inputs and outputs lie ready."""

    def __init__(
        self, inputs: dict[str, Any], outputs: dict[str, Any], heads: int, threads: int
    ) -> None:
        self._session = _session(heads, past="past" in inputs, threads=threads)
        self._binding = self._session.io_binding()
        for bind, arrays in (
            (self._binding.bind_input, inputs), (self._binding.bind_output, outputs)
        ):  # fmt: skip
            for name, x in arrays.items():
                bind(name, "cpu", 0, np.float32, x.shape, x.ctypes.data)
        self._kept = inputs, outputs

    def run(self) -> None:
        self._session.run_with_iobinding(self._binding)


class _Peer:
    name = "ONNX Runtime"
    version = VERSION
    forms = ("causal",)
    omits = "feature map, division"

    def _bound(self, q: Any, k: Any, v: Any) -> tuple[_Bound, Any]:
        heads, _, d = q.shape
        inputs = {
            "query": _packed(elu1(q)), "key": _packed(elu1(k)), "value": _packed(_with_ones(v))
        }  # fmt: skip
        out = np.empty_like(inputs["value"])
        state = np.empty((1, heads, d, v.shape[-1] + 1), np.float32)
        return _Bound(inputs, {"out": out, "state": state}, heads, get_num_threads()), out

    def side(self, q: Any, k: Any, v: Any, *, causal: bool = False) -> Callable[[], object]:
        assert causal, "the operator has no other form"
        return self._bound(q, k, v)[0].run

    def answer(self, q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
        bound, out = self._bound(q, k, v)
        bound.run()
        return _divided(out, len(q))


PEER = _Peer()


class Step:
    """One position: two sessions take turns, each reading the state that the other wrote."""

    def __init__(self, heads: int, d: int, threads: int = 1) -> None:
        self._heads = heads
        states = [np.zeros((1, heads, d, d + 1), np.float32) for _ in range(2)]
        self._inputs = {
            "query": np.empty((1, 1, heads * d), np.float32),
            "key": np.empty((1, 1, heads * d), np.float32),
            "value": np.ones((1, 1, heads * (d + 1)), np.float32),
        }
        self._out = np.empty_like(self._inputs["value"])
        self._turns = [
            _Bound(
                {**self._inputs, "past": states[i]},
                {"out": self._out, "state": states[1 - i]},
                heads,
                threads,
            )
            for i in range(2)
        ]

    def compute(self) -> None:
        """The operation alone, on inputs that lie ready."""
        self._turns[0].run()
        self._turns.reverse()

    def side(self, q: Any, k: Any, v: Any) -> Callable[[], object]:
        self._fill(q, k, v)
        return self.compute

    def _fill(self, q: Any, k: Any, v: Any) -> None:
        self._inputs["query"][0, 0] = elu1(q).ravel()
        self._inputs["key"][0, 0] = elu1(k).ravel()
        self._inputs["value"].reshape(self._heads, -1)[:, :-1] = v

    def step(self, q: Any, k: Any, v: Any) -> Any:
        self._fill(q, k, v)
        self.compute()
        return _divided(self._out, self._heads)[:, 0]
