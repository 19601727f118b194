"""What adapters of torch functions share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Tensors:
    """A peer that is a function of three tensors: (1, heads, n, d) -> (1, heads, n, d_v).

    With `positions_first` it wants, and gives, (1, n, heads, d). Tensors are made and laid out
    beforehand, and a side runs once before it is given away: `torch.compile` compiles there.
    """

    name: str
    version: str
    full: Function | None = None
    causal: Function | None = None
    omits: str = ""
    positions_first: bool = False

    @property
    def forms(self) -> tuple[str, ...]:
        return tuple(form for form in ("full", "causal") if getattr(self, form) is not None)

    def tensors(self, *arrays: Any) -> tuple[Tensor, ...]:
        """NumPy's arrays in its layout, contiguous; shared with NumPy where that has it already."""
        made = (torch.from_numpy(x)[None] for x in arrays)
        if self.positions_first:
            return tuple(x.transpose(1, 2).contiguous() for x in made)
        return tuple(made)

    def array(self, tensor: Tensor) -> Any:
        """(heads, n, d) of what `tensors` gives, in NumPy."""
        x = tensor.detach()
        return (x.transpose(1, 2) if self.positions_first else x)[0].numpy()

    def function(self, causal: bool) -> Function:
        chosen = self.causal if causal else self.full
        assert chosen is not None, f"{self.name} has no such form"
        return chosen

    def side(self, q: Any, k: Any, v: Any, *, causal: bool = False) -> Callable[[], object]:
        """A call without gradients."""
        function, inputs = self.function(causal), self.tensors(q, k, v)

        def run() -> object:
            with torch.inference_mode():
                return function(*inputs)

        run()
        return run

    def recorded(self, q: Any, k: Any, v: Any, *, causal: bool = False) -> Callable[[], object]:
        """The forward pass alone, with what its gradients need kept."""
        function = self.function(causal)
        inputs = [x.requires_grad_() for x in self.tensors(q, k, v)]

        def run() -> object:
            return function(*inputs)

        run()
        return run

    def gradients(self, q: Any, k: Any, v: Any, *, causal: bool = False) -> Callable[[], Any]:
        """Forward and backward: the gradients of q, k and v for an upstream gradient like v."""
        function = self.function(causal)
        inputs = [x.requires_grad_() for x in self.tensors(q, k, v)]
        (upstream,) = self.tensors(v)

        def run() -> tuple[Tensor, ...]:
            return torch.autograd.grad(function(*inputs), inputs, upstream)

        run()
        return run

    def answer(self, q: Any, k: Any, v: Any, *, causal: bool = False) -> Any:
        return self.array(self.function(causal)(*self.tensors(q, k, v)))

    def answer_gradients(self, q: Any, k: Any, v: Any, *, causal: bool = False) -> list[Any]:
        return [self.array(x) for x in self.gradients(q, k, v, causal=causal)()]


def elu1(x: Tensor) -> Tensor:
    """The map as it is usually written in torch."""
    return torch.nn.functional.elu(x) + 1


class Recurrence:
    """One step of a function (q, k, v, kv, k_sum) -> out that changes kv and k_sum in place.

    q, k, v: (1, heads, d), kv: (1, heads, d, d), k_sum: (1, heads, d) -> out: (1, heads, d).
    """

    def __init__(self, function: Callable[..., Tensor], heads: int, d: int) -> None:
        self._function = function
        self._state = torch.zeros(1, heads, d, d), torch.zeros(1, heads, d)

    def _next(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.inference_mode():
            return self._function(q, k, v, *self._state)

    def side(self, q: Any, k: Any, v: Any) -> Callable[[], Tensor]:
        """A step to time, its tensors made beforehand; q, k, v: (heads, d) NumPy arrays."""
        return functools.partial(self._next, *(torch.from_numpy(x)[None] for x in (q, k, v)))

    def step(self, q: Any, k: Any, v: Any) -> Any:
        return self.side(q, k, v)()[0].numpy()
