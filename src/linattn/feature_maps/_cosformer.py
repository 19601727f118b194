"""cosFormer: relu with a cosine of the distance between positions."""

from __future__ import annotations

# `project` is a field of FeatureMap and a method here.
# mypy: disable-error-code="misc"
import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .. import fronts
from ._base import Array, Family, Recipe, concatenate, constant, namespace, numbers, wide

__all__ = ["Cosformer"]


@dataclass(frozen=True, repr=False, eq=False)
class Cosformer(Family, label="cosformer"):
    r"""relu, weighed by how far apart query and key stand.

    ::

        phi(x_i) = (relu(x) cos(a_i), relu(x) sin(a_i))        a_i = pi i / (2 length),  D = 2 d_k
        phi(q_i) . phi(k_j) = relu(q) . relu(k) cos(pi (i - j) / (2 length))

    length:
        M of the paper: positions are 0 ... length. Between them the cosine is not negative.
    positions:
        where the rows stand; see `at`

    The map depends on position, and a row doesn't say where it stands: `at` does, for as many rows
    as the next call has. ``state.at(positions)`` does it for a state. The authors' code takes the
    length of each batch for M, so that the same tokens weigh differently in a longer sequence, and
    nothing can be streamed; here M is a parameter.

    Examples
    --------
    >>> import numpy as np
    >>> from linattn import State, linear_attention
    >>> cosformer = Cosformer(100)
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 12, 4))
    >>> whole = linear_attention(q, k, v, cosformer.at(range(12)), causal=True)
    >>> state = State.zeros((), cosformer.width(4), 4, cosformer, np.float64)
    >>> rows = [state.at([t]).step(q[t:t+1], k[t:t+1], v[t:t+1]) for t in range(12)]
    >>> bool(np.allclose(np.concatenate(rows), whole))
    True

    Source: Qin et al. 2022, "cosFormer: Rethinking Softmax in Attention", eq. 10 and its code.
    """

    length: int = 4096
    positions: Any = field(default=None, compare=False)

    kernel = "relu"  # relu(x) c = relu(x c) for c >= 0
    nonnegative = True
    positional = True
    computes = "relu(q_i) . relu(k_j) cos(pi (i - j) / (2 length))"
    paper = "arXiv 2202.08791"

    def __post_init__(self) -> None:
        if not isinstance(self.length, int) or self.length < 1:
            raise ValueError(f"length: expected an integer >= 1, got {self.length!r}")

    def at(self, positions: Any) -> Cosformer:
        """The same map for rows that stand there.

        positions: integers 0 ... length, as many as rows, or of any shape that broadcasts against
        the leading axes and positions of q and k; a range will do
        """
        if isinstance(positions, range):
            positions = list(positions)
        return replace(self, positions=positions)

    def width(self, d_k: int) -> int:
        return 2 * d_k

    def project(self, x: Array) -> Array:
        xp = namespace(x)
        x = wide(xp, x)
        if self.positions is None:
            raise ValueError(
                "positions: cosformer needs to know where rows stand, got none; pass "
                "feature_map.at(range(n)), or state.at(positions) for a state"
            )
        where = constant(xp, self.positions, x)
        # torch.compile compares a length that is a symbol only by itself, not in a tuple.
        if not where.ndim or (where.shape[-1] != 1 and where.shape[-1] != x.shape[-2]):
            raise ValueError(
                f"positions: expected one for each of {x.shape[-2]} rows, got shape "
                f"{tuple(where.shape)}"
            )
        front = fronts.front(where)
        readable = front is None or front.readable(where)  # not where it is traced
        if readable and not self._inside(where):
            raise ValueError(
                f"positions: expected 0 to length = {self.length}, beyond which weights would be "
                "negative; make the map with a larger length"
            )
        cosine, sine = self._turns(xp, where)
        return concatenate(xp, [x * cosine[..., None], x * sine[..., None]])

    def recipe(self, d_k: int) -> Recipe | None:
        """Where each row has a position of its own; `project` takes or refuses all others."""
        if self.positions is None or getattr(self.positions, "requires_grad", False):
            return None
        where = numbers(self.positions)
        if where.ndim != 1 or not where.size or not self._inside(where):
            return None
        angles = np.ascontiguousarray(np.stack(self._turns(np, where), -1))
        return Recipe(finish="turned", angles=angles)

    def _inside(self, where: Array) -> bool:
        return bool(((where >= 0) & (where <= self.length)).all())

    def _turns(self, xp: Any, where: Array) -> tuple[Array, Array]:
        """Cosine and sine of each row's angle."""
        angle = where * (math.pi / (2 * self.length))
        # cos(pi / 2) is a rounding away from 0, on either side of it.
        return xp.clip(xp.cos(angle), 0, None), xp.sin(angle)
