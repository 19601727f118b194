"""ggml's step of gated linear attention, through ggml-python: one operation in a graph of its own.

It computes S <- diag(g) S + k v^T, out = scale q S for all heads, in float32, without a feature map
and without a denominator: less than our step does. The new state comes out behind the output, so
two graphs take turns, each reading the state that the other wrote.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import ggml
import numpy as np

VERSION = f"ggml-python {ggml.__version__}"


class Step:
    """One position for `heads` heads of d features, a state of its own."""

    def __init__(self, heads: int, d: int, threads: int = 1) -> None:
        state = 4 * heads * d * d
        size = 4 * state + (1 << 20)
        self._context = ggml.ggml_init(ggml.ggml_init_params(mem_size=size, mem_buffer=None))
        if self._context is None:
            raise MemoryError("ggml_init")
        self._inputs, self._outputs, self._graphs, self._plans = [], [], [], []
        self._kept: list[Any] = []
        before: list[Any] = []
        for _ in range(2):
            k, v, q, g = (self._tensor(d, heads, 1) for _ in range(4))
            old = self._tensor(heads * d * d, 1)
            result = ggml.ggml_gated_linear_attn(self._context, k, v, q, g, old, 1.0)
            graph = ggml.ggml_new_graph(self._context)
            ggml.ggml_build_forward_expand(graph, result)
            plan = ggml.ggml_graph_plan(graph, threads)
            work = (ctypes.c_uint8 * max(1, plan.work_size))()
            plan.work_data = ctypes.cast(work, type(plan.work_data))
            self._kept += [work, plan]
            everything = self._view(result, (1 + d, heads * d))
            for tensor in (k, v, q, old):
                self._view(tensor, None)[:] = 0
            self._view(g, None)[:] = 1  # no decay
            self._inputs.append([self._view(t, (heads, d)) for t in (q, k, v)])
            self._outputs.append(everything[0].reshape(heads, d))
            everything[:] = 0
            self._graphs.append(graph)
            self._plans.append(ctypes.byref(plan))
            before.append((old, everything[1:]))
        for i in range(2):
            before[i][0].contents.data = before[1 - i][1].ctypes.data
        parts = zip(self._graphs, self._plans, self._inputs, self._outputs, strict=True)
        self._turns = itertools.cycle(parts)

    def _tensor(self, *shape: int) -> Any:
        make = (ggml.ggml_new_tensor_1d, ggml.ggml_new_tensor_2d, ggml.ggml_new_tensor_3d)
        return make[len(shape) - 1](self._context, ggml.GGML_TYPE_F32, *shape)

    def _view(self, tensor: Any, shape: tuple[int, ...] | None) -> Any:
        count = int(np.prod(tensor.contents.ne[:4]))
        data = ctypes.cast(tensor.contents.data, ctypes.POINTER(ctypes.c_float))
        flat = np.ctypeslib.as_array(data, (count,))
        return flat if shape is None else flat.reshape(shape)

    def compute(self) -> None:
        """The operation alone, on inputs that lie ready."""
        graph, plan, _, _ = next(self._turns)
        ggml.ggml_graph_compute(graph, plan)

    def step(self, q: Any, k: Any, v: Any) -> Any:
        """What a caller with NumPy arrays (heads, d) does: copy in, compute, copy out."""
        graph, plan, (to_q, to_k, to_v), out = next(self._turns)
        to_q[...], to_k[...], to_v[...] = q, k, v
        ggml.ggml_graph_compute(graph, plan)
        return out.copy()

    def __del__(self) -> None:
        ggml.ggml_free(self._context)
