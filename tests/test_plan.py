"""`plan`: the counts, the choice, the figures the README prints."""

import dataclasses
import random

import pytest

from linattn import backends
from linattn.plan import Plan, plan, prefers_quadratic

PRIMES = (1, 2, 3, 5, 7, 13, 31, 61, 67, 127, 131, 1021)


def matmul(rows: int, inner: int, columns: int) -> int:
    """Operations of a matrix product, counted one by one: a multiply and an add a term."""
    return sum(2 for _ in range(rows * inner * columns))


@pytest.mark.parametrize(
    ("n", "matrix", "ratio"),
    [
        (128, 16_384, 4.0),
        (1_024, 1_048_576, 256.0),
        (8_192, 67_108_864, 16_384.0),
        (10_000, 100_000_000, 24_414.0625),
    ],
)
def test_the_figures_of_the_readme(n: int, matrix: int, ratio: float) -> None:
    p = plan(n, n, 64)
    assert p.linear.elements == 4_096
    assert p.quadratic.elements == matrix
    assert p.compression == ratio
    text = str(p)
    assert "4,096" in text
    assert f"{matrix:,}" in text


@pytest.mark.parametrize("groups", [1, 3])
def test_operations_are_those_of_the_two_products(groups: int) -> None:
    n_q, n_k, d_k, d_v, D, batch = 5, 7, 2, 3, 11, 13
    p = plan(n_q, n_k, d_k, d_v, D=D, batch=batch, groups=groups)
    once = matmul(D, n_k, d_v)
    assert p.linear.operations == batch * (once + groups * matmul(n_q, D, d_v))
    scores = matmul(n_q, D, n_k) + matmul(n_q, n_k, d_v)
    assert p.quadratic.operations == batch * groups * scores
    assert p.quadratic.elements == batch * groups * n_q * n_k
    assert p.linear.elements == batch * D * d_v
    assert p.linear.normaliser_operations == batch * (n_k * D + groups * matmul(n_q, D, 1))
    assert p.quadratic.normaliser_operations == batch * groups * n_q * n_k
    assert p.linear.feature_operations == p.quadratic.feature_operations == 0


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_features_are_made_once_a_row_and_not_where_there_is_a_closed_form(
    causal: bool, groups: int
) -> None:
    n_q, n_k, batch = 7 if causal else 5, 7, 13
    given = {"D": 11, "batch": batch, "groups": groups, "causal": causal, "row_operations": 17}
    p = plan(n_q, n_k, 2, 3, **given)  # type: ignore[arg-type]
    made = batch * (n_k + groups * n_q) * 17
    assert p.linear.feature_operations == p.quadratic.feature_operations == made
    without = plan(n_q, n_k, 2, 3, **(given | {"row_operations": 0}))  # type: ignore[arg-type]
    assert p.linear.operations == without.linear.operations
    assert (p.order, p.crossover) == (without.order, without.crossover)  # both orders pay
    p = plan(n_q, n_k, 2, 3, closed_form=True, **given)  # type: ignore[arg-type]
    assert (p.linear.feature_operations, p.quadratic.feature_operations) == (made, 0)
    assert p.cost.compared == p.cost.operations + p.cost.feature_operations


def test_the_table_says_what_making_features_takes() -> None:
    assert "making features" not in str(plan(128, 128, 64))
    p = plan(1024, 1024, 64, D=2145, closed_form=True, row_operations=24 * 4225)
    line = next(x for x in str(p).splitlines() if x.startswith("making features"))
    assert line.split()[-2:] == ["207,667,200", "0"]
    assert p.reason == "2.87x fewer operations"


@pytest.mark.parametrize("closed_form", [False, True])
@pytest.mark.parametrize("chunk", [1, 4, 17, 100])
def test_the_causal_count_is_that_of_the_walk(chunk: int, closed_form: bool) -> None:
    n, d_k, d_v, D, groups = 37, 3, 5, 11, 2
    width = d_k if closed_form else D
    count = 0
    for start in range(0, n, chunk):
        rows = min(chunk, n - start)
        count += groups * matmul(rows, D, d_v) + matmul(D, rows, d_v)
        for seen in range(1, rows + 1):
            count += groups * (matmul(1, width, seen) + matmul(1, seen, d_v))
    p = plan(
        n, n, d_k, d_v, D=D, groups=groups, causal=True, chunk=chunk, closed_form=closed_form,
        row_operations=19,
    )  # fmt: skip
    assert p.linear.operations == count
    under = n * (n + 1) // 2
    assert p.quadratic.operations == 2 * groups * under * (width + d_v)
    one = closed_form and p.quadratic.compared < p.linear.compared
    assert (p.order, p.form) == ("quadratic" if one else "linear", "chunked")
    assert plan(1, 1, d_k, causal=True).form == "recurrent"


def test_auto_takes_the_cheaper() -> None:
    rng = random.Random(0)
    taken = set()
    for _ in range(500):
        n_q, n_k, d_k, d_v, D = (rng.choice(PRIMES) for _ in range(5))
        groups = rng.choice((1, 2, 5))
        closed_form, row = rng.random() < 0.5, rng.choice((0, 1, 1000))
        p = plan(
            n_q, n_k, d_k, d_v, D=D, groups=groups, closed_form=closed_form, row_operations=row
        )
        assert p.cost.compared == min(p.linear.compared, p.quadratic.compared)
        width, alone = (d_k, row) if closed_form else (D, 0)
        rule = prefers_quadratic(n_q, n_k, D, d_v, groups, width, alone)
        assert (p.order == "quadratic") == rule
        taken.add(p.order)
    assert taken == {"linear", "quadratic"}


@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize(
    ("d_k", "d_v", "D"), [(64, 64, 64), (7, 31, 13), (64, 64, 4161), (1, 1, 1)]
)
@pytest.mark.parametrize("closed_form", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("row_operations", [0, 333])
def test_crossover_is_where_the_counts_cross(
    groups: int, d_k: int, d_v: int, D: int, closed_form: bool, causal: bool, row_operations: int
) -> None:
    def at(n: int) -> Plan:
        return plan(
            n, n, d_k, d_v, D=D, groups=groups, closed_form=closed_form, causal=causal, chunk=13,
            row_operations=row_operations,
        )  # fmt: skip

    n = at(1).crossover
    assert at(n).linear.compared <= at(n).quadratic.compared
    if n > 1:
        assert at(n - 1).linear.compared > at(n - 1).quadratic.compared
    for longer in (n + 1, n + 12, n + 13, 2 * n, 10 * n):
        assert at(longer).linear.compared <= at(longer).quadratic.compared
        assert at(longer).crossover == n


def test_known_crossovers() -> None:
    assert plan(1, 1, 64).crossover == 64
    # second-order Taylor: 1 + 64 + 64 * 64 features
    assert plan(1, 1, 64, D=4161, closed_form=True).crossover == 4161
    # each of them an elementwise pass: 4161 (1 + 24 / 128), to the next integer
    found = plan(1, 1, 64, D=4161, closed_form=True, row_operations=24 * 4161)
    assert found.crossover == 4942
    assert plan(1, 1, 64, D=4161).crossover == 127


@pytest.mark.parametrize(
    "given",
    [{"state": True}, {"return_state": True}, {"causal": True}, {"state": True, "causal": True}],
)
def test_states_and_causality_mean_linear_and_say_so(given: dict[str, bool]) -> None:
    for order in ("auto", "linear", "quadratic"):
        p = plan(3, 3, 64, order=order, **given)  # type: ignore[arg-type]
        assert p.order == "linear"
        assert ("chunks" if "causal" in given else "state") in p.reason
        assert p.reason in str(p)


def test_an_order_can_be_asked_for() -> None:
    assert plan(3, 3, 64).order == "quadratic"
    assert plan(3, 3, 64, order="linear").order == "linear"
    assert plan(3000, 3000, 64, order="quadratic").order == "quadratic"


def test_rates_are_data_and_give_seconds() -> None:
    p = plan(8192, 8192, 64)
    assert p.linear.seconds is None
    assert "seconds" not in str(p)
    p = plan(8192, 8192, 64, batch=2, matmul_rate=1e9)
    cost = p.linear
    assert cost.seconds == (cost.operations + cost.normaliser_operations) / 1e9
    assert "seconds" in str(p)
    # inputs and output once: 2 heads, 4 arrays of 8,192 x 64 float32
    p = plan(8192, 8192, 64, batch=2, copy_rate=1e9)
    assert p.linear.seconds == p.quadratic.seconds == 2 * 4 * 8192 * 64 * 4 / 1e9
    slow = plan(8192, 8192, 64, batch=2, copy_rate=1e9, matmul_rate=1e30)
    assert slow.linear.seconds == p.linear.seconds


def test_memory() -> None:
    n, d = 65_536, 64
    p = plan(n, n, d)
    # phi(Q), phi(K), numerators; denominators; aggregate and key sum
    assert p.textbook_bytes == 4 * (3 * n * d + n + d * d + d)
    assert p.textbook_quadratic_bytes == 4 * (3 * n * d + n + n * n)
    closed = plan(n, n, d, closed_form=True)
    assert closed.textbook_quadratic_bytes == 4 * (n * d + n + n * n)
    assert plan(16 * n, 16 * n, d).peak_bytes == p.peak_bytes < p.textbook_bytes / 40
    assert p.peak_bytes == (1 << 20) + 2 * 8 * d * (d + 1)
    assert plan(n, n, d, threads=2).peak_bytes == 2 * p.peak_bytes
    kept = plan(n, n, d, batch=3, return_state=True).peak_bytes
    assert kept == p.peak_bytes + 3 * 8 * d * (d + 1)


def test_the_plan_is_frozen_and_comparable() -> None:
    p = plan(5, 7, 11)
    assert p == plan(5, 7, 11)
    assert hash(p) == hash(plan(5, 7, 11))
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.n_q = 6  # type: ignore[misc]


def test_the_table_shows_what_was_asked() -> None:
    text = str(plan(500, 500, 64, batch=6, groups=4, causal=True, chunk=32, closed_form=True))
    for word in ("batch 6", "4 query heads", "chunks of 32", "closed-form", "chunked form"):
        assert word in text
    assert all(line == line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize(("n_q", "n_k", "batch"), [(0, 0, 1), (0, 7, 1), (7, 0, 1), (3, 5, 0)])
def test_empty_sizes(n_q: int, n_k: int, batch: int) -> None:
    p = plan(n_q, n_k, 3, batch=batch)
    assert p.cost.operations == min(p.linear.operations, p.quadratic.operations)
    assert str(p)
    assert plan(n_q, n_q, 3, batch=batch, causal=True).linear.operations >= 0


@pytest.mark.parametrize(
    ("sizes", "given", "words"),
    [
        ((-1, 3, 5), {}, ("n_q", "-1", "0")),
        ((3, 3, 0), {}, ("d_k", "0", "1")),
        ((3, 2.5, 5), {}, ("n_k", "2.5", "integer")),
        ((3, 3, 5), {"order": "cubic"}, ("order", "cubic", "quadratic")),
        ((3, 5, 5), {"causal": True}, ("causal", "n_q = 3", "n_k = 5", "state")),
        ((3, 3, 4), {"row_operations": -1}, ("row_operations", "0", "-1")),
        ((3, 3, 4), {"matmul_rate": 0}, ("matmul_rate", "above 0", "got 0")),
        ((3, 3, 4), {"copy_rate": -1.0}, ("copy_rate", "above 0", "got -1.0")),
        ((3, 3, 4), {"copy_rate": float("nan")}, ("copy_rate", "finite", "got nan")),
    ],
)
def test_errors(
    sizes: tuple[int, int, int], given: dict[str, object], words: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError) as caught:
        plan(*sizes, **given)  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)


def test_the_native_core_repeats_the_rule() -> None:
    native = backends.native.extension
    if native is None:
        pytest.skip(f"the extension is missing: {backends.native.reason}")
    rng = random.Random(1)
    for _ in range(2000):
        sizes = [rng.choice(PRIMES) for _ in range(4)]
        groups = rng.choice((1, 2, 3, 8))
        assert native.prefers_quadratic(*sizes, groups) == prefers_quadratic(*sizes, groups)
    for n in (63, 64, 65):
        assert native.prefers_quadratic(n, n, 64, 64, 1) == (n < 64)
