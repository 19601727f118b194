"""What both orders of linear attention cost, before anything is computed.

::

    linear:     phi(Q) (phi(K)^T V)      2 n_k D d_v + 2 n_q D d_v        operations
    quadratic:  (phi(Q) phi(K)^T) V      2 n_q n_k D + 2 n_q n_k d_v      operations

A multiplication with its addition counts as two operations. What a map takes to make the features
of a row comes as one number more, in operations of these products: both orders pay it, but for the
quadratic one with a closed form, which makes no features.

Integers come in, a frozen and printable `Plan` goes out; this module knows no arrays. Rates are not
guessed: where predicted seconds are wanted, the caller passes what was measured.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

__all__ = ["Cost", "Plan", "closed_order", "plan", "prefers_one_chunk", "prefers_quadratic"]

Order = Literal["linear", "quadratic"]
Form = Literal["parallel", "chunked", "recurrent"]

_ORDERS = ("auto", "linear", "quadratic")
_CHUNK, _CLOSED_CHUNK = 32, 256  # of the core, and of maps with a closed form
_SUM_BYTES = 8  # the sums of a state are float64 whatever the input


def prefers_quadratic(
    n_q: int,
    n_k: int,
    D: int,
    d_v: int,
    groups: int = 1,
    width: int | None = None,
    row_operations: int = 0,
) -> bool:
    """Whether the quadratic order needs fewer operations than the linear one.

    ::

        2 groups n_q n_k (width + d_v)  <  (n_k + groups n_q) (2 D d_v + row_operations)

    The rule behind ``order="auto"``, alone and cheap enough for every call; `plan` uses it, and
    the native core repeats it.

    n_q, n_k:
        query and key positions
    D, d_v:
        features after the map, and of a value
    groups:
        query heads for each key head: the linear order shares ``phi(K)^T V`` among them
    width:
        operations/2 that one score phi(q) . phi(k) costs: D, or d_k where a closed-form kernel
        gives the score without expanding the features. None means D.
    row_operations:
        of making the features of a row, where the linear order alone makes any: those of a map
        with a closed form, else 0

    Examples
    --------
    >>> prefers_quadratic(63, 63, 64, 64), prefers_quadratic(64, 64, 64, 64)
    (True, False)
    >>> prefers_quadratic(1, 10_000, 64, 64)  # a single query: one pass over the keys
    True
    """
    if width is None:
        width = D
    queries = groups * n_q
    return 2 * queries * n_k * (width + d_v) < (n_k + queries) * (2 * D * d_v + row_operations)


def prefers_one_chunk(
    n: int,
    D: int,
    d_v: int,
    groups: int,
    width: int,
    row_operations: int = 0,
    chunk: int = _CLOSED_CHUNK,
) -> bool:
    """Whether the causal form of a map with a closed form is cheaper as one chunk, without a state.

    ::

        groups n (n + 1) (width + d_v)  <  (1 + groups) n (2 D d_v + row_operations)
                                           + what is inside the chunks

    width:
        operations/2 of a score: d_k
    row_operations:
        of making the features of a row

    Examples
    --------
    >>> prefers_one_chunk(1024, 2145, 64, 1, 64), prefers_one_chunk(16384, 2145, 64, 1, 64)
    (True, False)
    """
    outside = n * (n + 1) // 2 - _inside(n, chunk)
    row = 2 * D * d_v + row_operations
    return 2 * groups * outside * (width + d_v) < (1 + groups) * n * row


def closed_order(
    n_q: int,
    n_k: int,
    d_k: int,
    d_v: int,
    D: int,
    row_operations: int,
    groups: int,
    causal: bool,
    state: bool,
    order: str,
) -> Order:
    """The order in which a map with a closed form is computed, given the one that was asked for.

    Causal and "quadratic" together mean one chunk of all positions.

    state:
        whether one is given or returned

    Examples
    --------
    >>> closed_order(1024, 1024, 64, 64, 2145, 0, 1, causal=False, state=False, order="auto")
    'quadratic'
    """
    if state or order == "linear":
        return "linear"
    if causal:
        one = prefers_one_chunk(n_q, D, d_v, groups, d_k, row_operations)
        return "quadratic" if one else "linear"
    if order == "quadratic" or prefers_quadratic(n_q, n_k, D, d_v, groups, d_k, row_operations):
        return "quadratic"
    return "linear"


@dataclass(frozen=True)
class Cost:
    """What one order costs, summed over the batch and all heads.

    operations:
        of the two matrix products, multiplication and addition counted apart
    normaliser_operations:
        what the denominators add to them
    feature_operations:
        what making features adds to them, as far as the map says what a row takes
    elements:
        numbers in the product in the middle: the D x d_v aggregate, or the n_q x n_k matrix
    nbytes:
        the same in bytes, stored in the input's dtype
    seconds:
        ``max(all operations / matmul_rate, bytes of inputs and output / copy_rate)``: a floor, and
        None where neither rate was given
    """

    operations: int
    normaliser_operations: int
    feature_operations: int
    elements: int
    nbytes: int
    seconds: float | None = None

    @property
    def compared(self) -> int:
        """What the choice of an order goes by: the products, and making features."""
        return self.operations + self.feature_operations


@dataclass(frozen=True)
class Plan:
    """The price of both orders, and the one taken; made by `plan`, printed by ``print``.

    linear, quadratic:
        a `Cost` each
    order:
        the order taken, "linear" or "quadratic"; `reason` says why, `cost` is its `Cost`
    form:
        how it is walked: "parallel", "chunked" (causal) or "recurrent" (causal, one position)
    crossover:
        the shortest length n = n_q = n_k from which the linear order has no more operations
    textbook_bytes:
        peak memory beyond inputs and output of the formula written in NumPy in the linear order:
        phi(Q), phi(K), the aggregate, its key sum, numerators and denominators
    textbook_quadratic_bytes:
        the same with the n_q x n_k matrix in place of the aggregate (and, where there is a
        closed-form kernel, without phi(Q) and phi(K))
    peak_bytes:
        an upper bound of ours in the order taken: a workspace and two states a thread, and the
        state to return if one is asked for. It does not depend on n.
    """

    n_q: int
    n_k: int
    d_k: int
    d_v: int
    D: int
    batch: int
    groups: int
    causal: bool
    chunk: int
    closed_form: bool
    row_operations: int
    itemsize: int
    linear: Cost
    quadratic: Cost
    order: Order
    form: Form
    reason: str
    crossover: int
    textbook_bytes: int
    textbook_quadratic_bytes: int
    peak_bytes: int

    @property
    def cost(self) -> Cost:
        """The `Cost` of the order taken."""
        return self.linear if self.order == "linear" else self.quadratic

    @property
    def compression(self) -> float:
        """Numbers of the n_q x n_k matrix for each number of the aggregate."""
        return self.groups * self.n_q * self.n_k / (self.D * self.d_v)

    def __str__(self) -> str:
        return _table(self)


def plan(
    n_q: int,
    n_k: int,
    d_k: int,
    d_v: int | None = None,
    *,
    D: int | None = None,
    batch: int = 1,
    groups: int = 1,
    causal: bool = False,
    chunk: int | None = None,
    closed_form: bool = False,
    row_operations: int = 0,
    state: bool = False,
    return_state: bool = False,
    order: str = "auto",
    itemsize: int = 4,
    threads: int = 1,
    workspace: int = 1 << 20,
    matmul_rate: float | None = None,
    copy_rate: float | None = None,
) -> Plan:
    """Price both orders of linear attention and choose one.

    ::

        linear:     2 (n_k + groups n_q) D d_v
        quadratic:  2 groups n_q n_k (D + d_v)        D is d_k with a closed-form kernel
        chunked:    2 (1 + groups) n D d_v + groups sum_c c (c + 1) (D + d_v)
        features:   (n_k + groups n_q) row_operations     none of the quadratic order's with one

    for each key head, where the last sum runs over the lengths c of the chunks: the masked product
    inside them. In the causal form the quadratic order is priced as the product under the
    diagonal, n (n + 1)/2 scores.

    Parameters
    ----------
    n_q, n_k
        query and key positions (equal where causal)
    d_k, d_v
        features of a key and of a value; d_v None means d_k
    D
        features after the map; None means d_k
    batch
        key heads in all: the product of k's leading axes
    groups
        query heads for each key head
    causal, chunk
        whether position t sees keys up to t alone, and how many positions a chunk has; None is
        what is used: 32, and 256 with a closed form
    closed_form
        the map has a kernel for phi(q) . phi(k) that costs d_k rather than D a score, also inside
        chunks; where that is cheaper, the causal form takes all positions as one chunk
    row_operations
        what the map takes to make the features of a row, `FeatureMap.row_operations`
    state, return_state
        whether a state comes in or goes out: either means the linear order
    order
        "auto" takes the cheaper; "linear" and "quadratic" fix it as far as there is a choice
    itemsize
        bytes of an input element
    threads, workspace
        for `Plan.peak_bytes`: threads that work, and the bytes each may use for blocks
    matmul_rate, copy_rate
        measured operations a second of a matrix product, and bytes (read plus written) a second of
        a copy, for the whole machine; either gives predicted seconds

    Returns
    -------
    Plan

    Raises
    ------
    ValueError
        a size that is negative, an unknown order, a rate that is none, or a causal form with
        n_q != n_k

    Examples
    --------
    >>> p = plan(128, 128, 64)
    >>> p.linear.elements, p.quadratic.elements, p.compression
    (4096, 16384, 4.0)
    >>> p.order, p.crossover
    ('linear', 64)
    >>> print(p)
    n_q 128, n_k 128, d_k 64, d_v 64, D 64
    <BLANKLINE>
                                linear  quadratic
    operations               2,097,152  4,194,304
      with the normaliser    2,121,728  4,210,688
    numbers in the middle        4,096     16,384
      in bytes                  16 KiB     64 KiB
    textbook's extra memory    113 KiB    160 KiB
    <BLANKLINE>
    takes: linear order, parallel form (2.00x fewer operations)
    crossover: linear is no dearer from n = 64
    extra memory: at most 1.06 MiB, whatever n
    """
    n_q, n_k = _size("n_q", n_q, 0), _size("n_k", n_k, 0)
    d_k = _size("d_k", d_k, 1)
    d_v = d_k if d_v is None else _size("d_v", d_v, 1)
    D = d_k if D is None else _size("D", D, 1)
    batch, groups = _size("batch", batch, 0), _size("groups", groups, 1)
    if chunk is None:
        chunk = _CLOSED_CHUNK if closed_form else _CHUNK
    chunk, itemsize = _size("chunk", chunk, 1), _size("itemsize", itemsize, 1)
    row_operations = _size("row_operations", row_operations, 0)
    threads, workspace = _size("threads", threads, 1), _size("workspace", workspace, 0)
    for name, rate in (("matmul_rate", matmul_rate), ("copy_rate", copy_rate)):
        if rate is not None and not 0 < rate < math.inf:
            raise ValueError(f"{name}: expected a finite number above 0, a second, got {rate!r}")
    if order not in _ORDERS:
        raise ValueError(f"order: expected one of {', '.join(map(repr, _ORDERS))}, got {order!r}")
    if causal and n_q != n_k:
        raise ValueError(
            f"causal: expected n_q == n_k, got n_q = {n_q} and n_k = {n_k}; "
            "pass the earlier keys as a state"
        )
    width = d_k if closed_form else D
    queries = groups * n_q

    linear_ops = 2 * (n_k + queries) * D * d_v
    linear_sums = n_k * D + 2 * queries * D
    scores = groups * (n_q * (n_q + 1) // 2 if causal else n_q * n_k)
    if causal:
        inside = groups * _inside(n_q, chunk)
        linear_ops += 2 * inside * (width + d_v)
        linear_sums += inside

    moved = itemsize * batch * (queries * (d_k + d_v) + n_k * (d_k + d_v))

    def price(operations: int, sums: int, features: int, elements: int) -> Cost:
        seconds = None
        if matmul_rate is not None:
            seconds = batch * (operations + sums + features) / matmul_rate
        if copy_rate is not None:
            seconds = max(seconds or 0.0, moved / copy_rate)
        return Cost(
            operations=batch * operations,
            normaliser_operations=batch * sums,
            feature_operations=batch * features,
            elements=batch * elements,
            nbytes=batch * elements * itemsize,
            seconds=seconds,
        )

    made = (n_k + queries) * row_operations
    alone = row_operations if closed_form else 0  # of a row, in the linear order only
    linear = price(linear_ops, linear_sums, made, D * d_v)
    quadratic = price(2 * scores * (width + d_v), scores, 0 if closed_form else made, queries * n_k)

    # The decision. Where it is no choice, the reason says so, so that nothing is overruled unseen.
    taken: Order = "linear"
    less, more = sorted((linear.compared, quadratic.compared))
    if (
        causal
        and not (state or return_state)
        and closed_form
        and order == "auto"
        and (prefers_one_chunk(n_q, D, d_v, groups, width, row_operations, chunk))
    ):
        taken = "quadratic"
        reason = f"{more / less:.2f}x fewer operations, all positions as one chunk"
    elif causal:
        reason = "the causal form walks chunks"
    elif state or return_state:
        reason = "a state is the linear order's aggregate"
    elif order != "auto":
        taken = "quadratic" if order == "quadratic" else "linear"
        reason = "as asked"
    else:
        if prefers_quadratic(n_q, n_k, D, d_v, groups, width, alone):
            taken = "quadratic"
        reason = f"{more / less:.2f}x fewer operations" if 0 < less < more else "no dearer"
    form: Form = "parallel"
    if causal:
        form = "recurrent" if n_q == 1 else "chunked"

    # Memory beyond inputs and output, each product of the formula stored whole.
    maps = (queries + n_k) * D
    rows = queries * (d_v + 1)
    state_bytes = _SUM_BYTES * D * (d_v + 1)
    peak = threads * (workspace + 2 * state_bytes if taken == "linear" else workspace)
    return Plan(
        n_q=n_q,
        n_k=n_k,
        d_k=d_k,
        d_v=d_v,
        D=D,
        batch=batch,
        groups=groups,
        causal=causal,
        chunk=chunk,
        closed_form=closed_form,
        row_operations=row_operations,
        itemsize=itemsize,
        linear=linear,
        quadratic=quadratic,
        order=taken,
        form=form,
        reason=reason,
        crossover=_crossover(
            2 * D * d_v + alone,
            2 * (width + d_v),
            groups,
            chunk if causal else None,
        ),
        textbook_bytes=itemsize * batch * (maps + rows + D * d_v + D),
        textbook_quadratic_bytes=(
            itemsize * batch * ((0 if closed_form else maps) + rows + queries * n_k)
        ),
        peak_bytes=peak + (batch * state_bytes if return_state else 0),
    )


def _size(name: str, value: int, least: int) -> int:
    try:
        size = operator.index(value)
    except TypeError:
        raise ValueError(f"{name}: expected an integer, got {value!r}") from None
    if size < least:
        raise ValueError(f"{name}: expected at least {least}, got {size}")
    return size


def _inside(n: int, chunk: int) -> int:
    """Scores on and under the diagonal of the chunks of n positions."""
    whole, rest = divmod(n, chunk)
    return whole * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2


def _crossover(row: int, pair: int, groups: int, chunk: int | None) -> int:
    """The least n >= 1 from which the linear order has no more operations.

    row: operations of a row that the linear order alone makes
    pair: of a query with a key
    """
    if chunk is None:
        return -(-(1 + groups) * row // (groups * pair))

    def no_dearer(n: int) -> bool:
        outside = groups * (n * (n + 1) // 2 - _inside(n, chunk))
        return (1 + groups) * n * row <= outside * pair

    return _first(no_dearer)


def _first(holds: Callable[[int], bool]) -> int:
    """The least n >= 1 for which it holds, where it holds for all larger n too.

    For the chunked form it does: the difference of the two counts is convex in n and 0 at n = 0.
    """
    high = 1
    while not holds(high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _table(p: Plan) -> str:
    sizes = f"n_q {p.n_q:,}, n_k {p.n_k:,}, d_k {p.d_k:,}, d_v {p.d_v:,}, D {p.D:,}"
    if p.batch != 1 or p.groups != 1:
        sizes += f", batch {p.batch:,}"
    if p.groups != 1:
        sizes += f", {p.groups:,} query heads a key head"
    if p.causal:
        sizes += f", causal in chunks of {p.chunk:,}"
    if p.closed_form:
        sizes += ", closed-form kernel"

    costs = (p.linear, p.quadratic)
    rows: list[tuple[str, str, str]] = []

    def row(label: str, linear: str, quadratic: str) -> None:
        rows.append((label, linear, quadratic))

    row("", "linear", "quadratic")
    row("operations", *(f"{c.operations:,}" for c in costs))
    row("  with the normaliser", *(f"{c.operations + c.normaliser_operations:,}" for c in costs))
    if p.row_operations:
        row("making features", *(f"{c.feature_operations:,}" for c in costs))
    row("numbers in the middle", *(f"{c.elements:,}" for c in costs))
    row("  in bytes", *(_bytes(c.nbytes) for c in costs))
    row("textbook's extra memory", _bytes(p.textbook_bytes), _bytes(p.textbook_quadratic_bytes))
    if p.linear.seconds is not None and p.quadratic.seconds is not None:
        row("seconds, at least", _seconds(p.linear.seconds), _seconds(p.quadratic.seconds))
    widths = [max(len(r[i]) for r in rows) for i in range(3)]
    lines = [
        f"{label:<{widths[0]}}  {linear:>{widths[1]}}  {quadratic:>{widths[2]}}"
        for label, linear, quadratic in rows
    ]
    return "\n".join(
        [
            sizes,
            "",
            *lines,
            "",
            f"takes: {p.order} order, {p.form} form ({p.reason})",
            f"crossover: linear is no dearer from n = {p.crossover:,}",
            f"extra memory: at most {_bytes(p.peak_bytes)}, whatever n",
        ]
    )


def _bytes(count: int) -> str:
    if count < 1000:
        return f"{count} B"
    value, unit = float(count), "B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        value /= 1024
        if value < 1000:
            break
    return f"{value:,.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def _seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"
