"""ggml's gated linear attention, through ggml-python: one operation in a graph of its own.

It computes S <- diag(g) S + k v^T, out = scale q S for all heads and position by position, in
float32, without a feature map and without a denominator: less than we do. The new state comes out
behind the output, so for steps two graphs take turns, each reading the state that the other wrote.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import ggml
import numpy as np

from linattn import get_num_threads

VERSION = f"ggml-python {ggml.__version__}"


class _Context:
    """Memory for tensors, and what runs a graph of one operation."""

    def __init__(self, size: int) -> None:
        size += 1 << 20
        self._context = ggml.ggml_init(ggml.ggml_init_params(mem_size=size, mem_buffer=None))
        if self._context is None:
            raise MemoryError("ggml_init")
        self._kept: list[Any] = []

    def attention(self, n: int, heads: int, d: int, threads: int) -> tuple[Any, ...]:
        """The graph and its plan; views of q, k, v: (n, heads, d), the state before, and out."""
        k, v, q, g = (self._tensor(d, heads, n) for _ in range(4))
        old = self._tensor(heads * d * d, 1)
        result = ggml.ggml_gated_linear_attn(self._context, k, v, q, g, old, 1.0)
        graph = ggml.ggml_new_graph(self._context)
        ggml.ggml_build_forward_expand(graph, result)
        plan = ggml.ggml_graph_plan(graph, threads)
        work = (ctypes.c_uint8 * max(1, plan.work_size))()
        plan.work_data = ctypes.cast(work, type(plan.work_data))
        self._kept += [work, plan]
        everything = self._view(result, (n + d, heads * d))
        everything[:] = 0
        for tensor in (k, v, q, old):
            self._view(tensor, None)[:] = 0
        self._view(g, None)[:] = 1  # no decay
        inputs = [self._view(t, (n, heads, d)) for t in (q, k, v)]
        return graph, ctypes.byref(plan), inputs, old, everything

    def _tensor(self, *shape: int) -> Any:
        make = (ggml.ggml_new_tensor_1d, ggml.ggml_new_tensor_2d, ggml.ggml_new_tensor_3d)
        return make[len(shape) - 1](self._context, ggml.GGML_TYPE_F32, *shape)

    def _view(self, tensor: Any, shape: tuple[int, ...] | None) -> Any:
        count = int(np.prod(tensor.contents.ne[:4]))
        data = ctypes.cast(tensor.contents.data, ctypes.POINTER(ctypes.c_float))
        flat = np.ctypeslib.as_array(data, (count,))
        return flat if shape is None else flat.reshape(shape)

    def __del__(self) -> None:
        ggml.ggml_free(self._context)


class _Peer:
    name = "ggml"
    version = VERSION
    forms = ("causal",)
    omits = "feature map, denominator"

    def _graph(self, q: Any, k: Any, v: Any) -> tuple[Callable[[], object], Any]:
        heads, n, d = q.shape
        context = _Context(4 * (6 * n + 4 * d) * heads * d)
        graph, plan, inputs, _, everything = context.attention(n, heads, d, get_num_threads())
        for to, x in zip(inputs, (q, k, v), strict=True):
            to[...] = x.swapaxes(0, 1)

        def run(kept: _Context = context) -> None:
            ggml.ggml_graph_compute(graph, plan)

        return run, everything[:n].reshape(n, heads, d)

    def side(self, q: Any, k: Any, v: Any, *, causal: bool = False) -> Callable[[], object]:
        assert causal, "ggml has no other form"
        return self._graph(q, k, v)[0]

    def answer(self, q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
        run, out = self._graph(q, k, v)
        run()
        return out.swapaxes(0, 1).copy()


PEER = _Peer()


class Step:
    """One position for `heads` heads of d features, a state of its own."""

    def __init__(self, heads: int, d: int, threads: int = 1) -> None:
        self._context = _Context(16 * heads * d * d)
        both = [self._context.attention(1, heads, d, threads) for _ in range(2)]
        for i in range(2):
            old, state = both[i][3], both[1 - i][4][1:]
            old.contents.data = state.ctypes.data
        parts = [
            (graph, plan, [x[0] for x in inputs], everything[0].reshape(heads, d))
            for graph, plan, inputs, _, everything in both
        ]
        self._turns = itertools.cycle(parts)

    def compute(self) -> None:
        """The operation alone, on inputs that lie ready."""
        graph, plan, _, _ = next(self._turns)
        ggml.ggml_graph_compute(graph, plan)

    def side(self, q: Any, k: Any, v: Any) -> Callable[[], object]:
        """The same, with these inputs."""
        for _ in range(2):
            self.step(q, k, v)
        return self.compute

    def step(self, q: Any, k: Any, v: Any) -> Any:
        """What a caller with NumPy arrays (heads, d) does: copy in, compute, copy out."""
        graph, plan, (to_q, to_k, to_v), out = next(self._turns)
        to_q[...], to_k[...], to_v[...] = q, k, v
        ggml.ggml_graph_compute(graph, plan)
        return out.copy()
