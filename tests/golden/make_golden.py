"""Compute golden.json: small cases of linear attention at 50 digits.

    python make_golden.py            write golden.json beside this file
    python make_golden.py --check    compute everything anew and compare

Everything is computed from the literal definition with mpmath, in plain loops over Python lists,
and rounded to float64 once, at the end. No NumPy and nothing of linattn takes part, so that the
oracle itself is checked by something that shares no code with it.

Every input has at most eight significant bits and a moderate exponent: float16, bfloat16, float32
and float64 hold it exactly and see the same problem.

What is stored for a case, arrays flat in row-major order with their shape:

    out          numerator / (denominator + eps), 0 where that is 0; or the numerator
    bound        (sum_j s_ij |v_j| + |out_i| sum_j s_ij) / |denominator_i + eps|, the size of an
                 error, with s_ij = sum_d |phi_d(q_i)| |phi_d(k_j)| (2 + c_d(q_i) + c_d(k_j)) and
                 c = |x phi'(x) / phi(x)|; without normalisation the numerator's part alone
    final        the true sums after the call, kv and k_sum, each number as [m, e]: m * 2**e

"earlier" holds keys and values that came before; out, bound and final include them.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

from mpmath import mp, mpf

mp.dps = 50
PATH = Path(__file__).with_name("golden.json")


# ------------------------------------------------------------------------- the maps and |x phi'|


def each(phi, sway):
    """A map that acts on every number alone."""
    return lambda x: [phi(a) for a in x], lambda x: [abs(sway(a)) for a in x]


def sigmoid(x):
    return 1 / (1 + mp.exp(-x))


MAPS = {
    "elu1": each(
        lambda x: x + 1 if x >= 0 else mp.exp(x), lambda x: x if x >= 0 else x * mp.exp(x)
    ),
    "relu": each(lambda x: max(x, mpf(0)), lambda x: max(x, mpf(0))),
    "squared_relu": each(lambda x: max(x, mpf(0)) ** 2, lambda x: 2 * max(x, mpf(0)) ** 2),
    "exp": each(mp.exp, lambda x: x * mp.exp(x)),
    "softplus": each(lambda x: mp.log1p(mp.exp(x)), lambda x: x * sigmoid(x)),
    "sigmoid": each(sigmoid, lambda x: x * sigmoid(x) * sigmoid(-x)),
    "identity": each(lambda x: x, lambda x: x),
    # Two maps that are known by no name, with more features than the row has numbers.
    "mirror": (
        lambda x: [max(a, mpf(0)) for a in x] + [max(-a, mpf(0)) for a in x],
        lambda x: [max(a, mpf(0)) for a in x] + [max(-a, mpf(0)) for a in x],
    ),
    "pairs": (
        lambda x: [a * b for a in x for b in x],
        lambda x: [2 * abs(a * b) for a in x for b in x],
    ),
}


# ------------------------------------------------------------------------------- the definition


def attend(row_q, keys, values, start, phi, sway, eps, normalize):
    """One row: the output and the size of its error, each a list of d_v numbers."""
    fq, gq = phi(row_q), sway(row_q)
    d_v = len(start["kv"][0])
    numerator, size = [mpf(0)] * d_v, [mpf(0)] * d_v
    denominator, weight = mpf(0), mpf(0)
    for row_k, row_v in zip(keys, values, strict=True):
        fk, gk = phi(row_k), sway(row_k)
        score = sum(a * b for a, b in zip(fq, fk, strict=True))
        s = sum(
            2 * abs(a * b) + ga * abs(b) + abs(a) * gb
            for a, ga, b, gb in zip(fq, gq, fk, gk, strict=True)
        )
        denominator += score
        weight += s
        for c in range(d_v):
            numerator[c] += score * row_v[c]
            size[c] += s * abs(row_v[c])
    for d in range(len(fq)):
        denominator += fq[d] * start["k_sum"][d]
        weight += (2 * abs(fq[d]) + gq[d]) * abs(start["k_sum"][d])
        for c in range(d_v):
            numerator[c] += fq[d] * start["kv"][d][c]
            size[c] += (2 * abs(fq[d]) + gq[d]) * abs(start["kv"][d][c])
    if not normalize:
        return numerator, size
    below = denominator + eps
    if below == 0:
        out = [mpf(0)] * d_v
        return out, [mpf(0) if b == 0 and weight == 0 else mp.inf for b in size]
    out = [a / below for a in numerator]
    return out, [(b + abs(a) * weight) / abs(below) for a, b in zip(out, size, strict=True)]


def sums(keys, values, start, phi):
    """kv = start + sum phi(k)^T v, k_sum = start + sum phi(k)."""
    kv, k_sum = [list(row) for row in start["kv"]], list(start["k_sum"])
    for row_k, row_v in zip(keys, values, strict=True):
        for d, f in enumerate(phi(row_k)):
            k_sum[d] += f
            for c, x in enumerate(row_v):
                kv[d][c] += f * x
    return kv, k_sum


# ------------------------------------------------------------------------------------- arrays


class Array:
    """Numbers in row-major order, and a shape."""

    def __init__(self, shape, data):
        self.shape, self.data = tuple(shape), list(data)

    def head(self, index, axes=2):
        """The last axes at a leading index, as nested lists; an axis of 1 serves every index."""
        batch = self.shape[: len(self.shape) - axes]
        index = index[len(index) - len(batch) :]
        at = 0
        for i, size in zip(index, batch, strict=True):
            at = at * size + (i if size != 1 else 0)
        inner = self.shape[len(batch) :]
        count = 1
        for size in inner:
            count *= size
        flat = self.data[at * count : (at + 1) * count]
        if axes == 1:
            return flat
        return [flat[r * inner[1] : (r + 1) * inner[1]] for r in range(inner[0])]


def real(array):
    return Array(array.shape, map(mpf, array.data))


def power_of_two(x):
    """m * 2**e with m a float64."""
    if x == 0:
        return [0.0, 0]
    m, e = mp.frexp(x)
    return [float(m), int(e)]


# ------------------------------------------------------------------------------------- one case


def solve(case):
    """Fill in out, bound and final."""
    phi, sway = MAPS[case["feature_map"]]
    q, k, v = (real(case[name]) for name in "qkv")
    eps = case["eps"]
    if eps is None:
        eps = 0.0 if case["feature_map"] == "exp" else 1e-6
    eps = mpf(eps)
    causal, normalize = case["causal"], case["normalize"]
    n_q, n_k, d_v = q.shape[-2], k.shape[-2], v.shape[-1]
    D = len(phi([mpf(0)] * k.shape[-1]))

    key_batch = case["key_batch"]
    batch = case["batch"]
    groups = batch[-1] // key_batch[-1] if case["enable_gqa"] else 1
    packed = case["cu_seqlens"] is not None
    cuts = [((0, n_q), (0, n_k))]
    if packed:
        cuts = [(cut, cut) for cut in itertools.pairwise(case["cu_seqlens"])]

    def key_head(index):
        """Query head h is served by key head h // groups; an axis of 1 serves all."""
        index = index[len(index) - len(key_batch) :]
        if groups > 1:
            index = (*index[:-1], index[-1] // groups)
        return tuple(i if size != 1 else 0 for i, size in zip(index, key_batch, strict=True))

    def start(sequence, key):
        if case["state"] is None:
            return {"kv": [[mpf(0)] * d_v for _ in range(D)], "k_sum": [mpf(0)] * D}
        at = (sequence, *key) if packed else key
        kv, k_sum = real(case["state"]["kv"]).head(at), real(case["state"]["k_sum"]).head(at, 1)
        if case["state"]["log_scale"] is not None:
            power = [mpf(2) ** int(e) for e in case["state"]["log_scale"].head(at, 1)]
            kv = [[x * p for x in row] for row, p in zip(kv, power, strict=True)]
            k_sum = [x * p for x, p in zip(k_sum, power, strict=True)]
        return {"kv": kv, "k_sum": k_sum}

    def seen(key, j):
        mask = case["key_mask"]
        return mask is None or bool(mask.head(key, 1)[j])

    def earlier(key):
        if case["earlier"] is None:
            return [], []
        return real(case["earlier"]["k"]).head(key), real(case["earlier"]["v"]).head(key)

    out, bound = {}, {}
    for sequence, ((q0, q1), (k0, k1)) in enumerate(cuts):
        for index in itertools.product(*map(range, batch)):
            key = key_head(index)
            rows, keys, values = q.head(index), k.head(key), v.head(key)
            before_k, before_v = earlier(key)
            for i in range(q0, q1):
                js = [j for j in range(k0, k1) if seen(key, j) and (j <= i or not causal)]
                out[(*index, i)], bound[(*index, i)] = attend(
                    rows[i],
                    before_k + [keys[j] for j in js],
                    before_v + [values[j] for j in js],
                    start(sequence, key),
                    phi,
                    sway,
                    eps,
                    normalize,
                )
    order = list(itertools.product(*map(range, (*batch, n_q))))
    shape = [*batch, n_q, d_v]
    case["out"] = Array(shape, [float(x) for at in order for x in out[at]])
    # Nine digits, by Python: releases of mpmath differ in which way they round a tie.
    case["bound"] = Array(shape, [float(f"{float(x):.9g}") for at in order for x in bound[at]])

    kv_all, sum_all = [], []
    for sequence, (_, (k0, k1)) in enumerate(cuts):
        for key in itertools.product(*map(range, key_batch)):
            before_k, before_v = earlier(key)
            js = [j for j in range(k0, k1) if seen(key, j)]
            kv, k_sum = sums(
                before_k + [k.head(key)[j] for j in js],
                before_v + [v.head(key)[j] for j in js],
                start(sequence, key),
                phi,
            )
            kv_all += [power_of_two(x) for row in kv for x in row]
            sum_all += [power_of_two(x) for x in k_sum]
    lead = [len(cuts), *key_batch] if packed else [*key_batch]
    case["final"] = {"kv": Array([*lead, D, d_v], kv_all), "k_sum": Array([*lead, D], sum_all)}


# ------------------------------------------------------------------------------------ the cases


class Dice:
    """Small multiples of 1/16, the same on every machine (a linear congruential generator)."""

    def __init__(self, seed):
        self.seed = seed * 7919 + 12345

    def roll(self, sides):
        self.seed = (self.seed * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.seed >> 33) % sides

    def array(self, *shape, scale=1.0):
        count = 1
        for size in shape:
            count *= size
        return Array(shape, [scale * (self.roll(97) - 48) / 16 for _ in range(count)])

    def mask(self, *shape):
        count = 1
        for size in shape:
            count *= size
        return Array(shape, [self.roll(3) > 0 for _ in range(count)])


def choose(array, values):
    """The same shape, numbers drawn in turn from a list."""
    return Array(array.shape, [values[i % len(values)] for i in range(len(array.data))])


def cases():
    made = []

    def add(name, q, k, v, feature_map="elu1", **given):
        case = {
            "name": name,
            "feature_map": feature_map,
            "eps": None,
            "causal": False,
            "key_mask": None,
            "cu_seqlens": None,
            "enable_gqa": False,
            "normalize": True,
            "state": None,
            "earlier": None,
            "batch": list(q.shape[:-2]),
            "key_batch": list(k.shape[:-2]),
            "q": q,
            "k": k,
            "v": v,
        }
        unknown = set(given) - set(case)
        assert not unknown, unknown
        case.update(given)
        made.append(case)

    dice = Dice(1)
    for name in MAPS:
        add(f"{name}", dice.array(5, 3), dice.array(7, 3), dice.array(7, 2), name)
        add(f"{name} causal", *dice_self(dice, 7, 3, 2), name, causal=True)

    # one of everything, and nothing
    add("one token", *dice_self(dice, 1, 1, 1), causal=True)
    add("no keys", dice.array(3, 2), dice.array(0, 2), dice.array(0, 5))
    add("no keys, exp", dice.array(3, 2), dice.array(0, 2), dice.array(0, 5), "exp")

    # batch and heads, broadcast too
    add("batch", dice.array(2, 3, 5, 2), dice.array(2, 3, 7, 2), dice.array(2, 3, 7, 3))
    add("batch causal exp", *dice_self(dice, 5, 2, 3, lead=(2, 3)), "exp", causal=True)
    add(
        "broadcast",
        dice.array(2, 1, 3, 2),
        dice.array(3, 5, 2),
        dice.array(3, 5, 3),
        batch=[2, 3],
    )

    # masks; masked keys are far larger than the rest
    for name in ("elu1", "relu", "exp", "identity"):
        for causal in (False, True):
            q, k, v = dice_self(dice, 7, 3, 2)
            mask = Array((7,), [False, True, False, True, True, False, True])
            for j in (0, 2, 5):
                k.data[3 * j : 3 * j + 3] = [96.0, 88.0, -104.0]
                v.data[2 * j : 2 * j + 2] = [120.0, -120.0]
            tail = " causal" if causal else ""
            add(f"mask {name}{tail}", q, k, v, name, causal=causal, key_mask=mask)
    q, k, v = dice_self(dice, 5, 2, 3, lead=(2, 3))
    add("mask a head", q, k, v, key_mask=dice.mask(2, 3, 5))
    add("mask a batch", q, k, v, key_mask=dice.mask(2, 1, 5), causal=True)
    add("all masked", *dice_self(dice, 5, 2, 3), key_mask=Array((5,), [False] * 5))
    add("all masked exp", *dice_self(dice, 5, 2, 3), "exp", key_mask=Array((5,), [False] * 5))

    # grouped heads: 6 query heads, 2 key heads
    for name in ("elu1", "exp", "pairs"):
        for causal in (False, True):
            n = 5 if causal else 7
            q, k, v = dice.array(6, 5, 2), dice.array(2, n, 2), dice.array(2, n, 3)
            tail = " causal" if causal else ""
            add(f"grouped {name}{tail}", q, k, v, name, causal=causal, enable_gqa=True)
    add(
        "grouped, mask, no normalisation",
        dice.array(2, 6, 3, 2),
        dice.array(2, 2, 5, 2),
        dice.array(2, 2, 5, 3),
        key_mask=dice.mask(2, 2, 5),
        enable_gqa=True,
        normalize=False,
    )

    # eps that matters
    for eps in (0.0, 0.5, 3.0):
        for name in ("elu1", "relu", "exp"):
            q, k, v = dice.array(5, 3), dice.array(7, 3), dice.array(7, 2)
            add(f"eps {eps:g} {name}", q, k, v, name, eps=eps)
            q, k, v = dice_self(dice, 7, 3, 2)
            add(f"eps {eps:g} {name} causal", q, k, v, name, eps=eps, causal=True)
    for x in (-6.0, -16.0, -20.0, -35.0):
        one = Array((1, 3), [x] * 3)
        v = Array((1, 2), [1.5, -3.0])
        add(f"one token at {x:g}", one, one, v)
        add(f"one token at {x:g}, eps 0", one, one, v, eps=0.0)
    for name in ("elu1", "softplus", "sigmoid"):
        q, k, v = dice_self(dice, 5, 3, 2)
        q, low = choose(q, [-12.0, -20.0]), choose(k, [-20.0, -18.0, -21.0, -19.5])
        add(f"{name} far down, eps 0", q, low, v, name, eps=0.0)
        wide = choose(k, [100.0, -100.0, 3.0, -20.0, 0.5])
        add(f"{name} far up and down", dice.array(5, 3), wide, v, name, causal=True)
    q, k, v = dice_self(dice, 5, 3, 2)
    low = Array(k.shape, [-abs(x) for x in k.data])
    add("relu of negatives", q, low, v, "relu")
    add("relu of negatives, eps 0", q, low, v, "relu", eps=0.0, causal=True)
    add("squared relu of negatives", low, low, v, "squared_relu", causal=True)

    # exp far from 0
    for size in (100.0, 1000.0):
        far = [size, -size, 0.0, -size, size, size, -size, -size, 0.5]
        q, k, v = dice_self(dice, 7, 3, 2)
        q, k = choose(q, [-x for x in far]), choose(k, far)
        for causal in (False, True):
            tail = " causal" if causal else ""
            add(f"exp of {size:g}{tail}", q, k, v, "exp", causal=causal)
            mask = Array((7,), [True, True, False, True, False, True, True])
            add(f"exp of {size:g}, mask{tail}", q, k, v, "exp", causal=causal, key_mask=mask)
        add(
            f"one feature up, one down, {size:g}",
            Array((1, 2), [-size, size]),
            Array((2, 2), [size, -size, size - 8, -size + 8]),
            Array((2, 1), [1.0, 3.0]),
            "exp",
        )
        add(f"the last key is huge, {size:g}", *last_huge(dice, size), "exp", causal=True)
        add(f"all low, {size:g}", Array((1, 3), [0.0] * 3), choose(k, [-size]), v, "exp")
    low = choose(Array((5, 3), [0.0] * 15), [-16.0, -15.0, -17.0, -14.0])
    q, v = dice.array(3, 3), dice.array(5, 2)
    add("exp, denominators below eps", q, low, v, "exp", eps=1e-6)
    add("exp of -100, eps 1e-6", q, choose(low, [-100.0]), v, "exp", eps=1e-6)
    add("exp of 100, eps 1e-6", q, choose(low, [100.0, 99.0]), v, "exp", eps=1e-6)

    # numerators alone
    for name in ("elu1", "identity", "exp", "mirror"):
        q, k, v = dice.array(5, 3), dice.array(7, 3), dice.array(7, 2)
        add(f"numerator {name}", q, k, v, name, normalize=False)
        q, k, v = dice_self(dice, 7, 3, 2)
        add(f"numerator {name} causal", q, k, v, name, normalize=False, causal=True)

    # packed sequences, an empty one among them
    cuts = [0, 3, 3, 7]
    for name in ("elu1", "exp", "squared_relu"):
        for causal in (False, True):
            q, k, v = dice_self(dice, 7, 3, 2)
            tail = " causal" if causal else ""
            add(f"packed {name}{tail}", q, k, v, name, causal=causal, cu_seqlens=cuts)
    q, k, v = dice.array(4, 7, 2), dice.array(2, 7, 2), dice.array(2, 7, 3)
    mask = dice.mask(2, 7)
    add(
        "packed, grouped, mask",
        q,
        k,
        v,
        cu_seqlens=cuts,
        enable_gqa=True,
        key_mask=mask,
        causal=True,
    )

    # sums of keys that came before: given as such, or as the keys
    for name in ("elu1", "identity", "exp"):
        for causal in (False, True):
            tail = " causal" if causal else ""
            n = 5 if causal else 7
            given = {"kv": dice.array(3, 2), "k_sum": positive(dice.array(3)), "log_scale": None}
            if name == "exp":
                given["log_scale"] = Array((3,), [2, -3, 0])
            q, k, v = dice.array(5, 3), dice.array(n, 3), dice.array(n, 2)
            add(f"state {name}{tail}", q, k, v, name, causal=causal, state=given)
            before = {"k": dice.array(4, 3), "v": dice.array(4, 2)}
            add(f"continued {name}{tail}", q, k, v, name, causal=causal, earlier=before)
    given = {
        "kv": dice.array(3, 3, 2),
        "k_sum": positive(dice.array(3, 3)),
        "log_scale": Array((3, 3), [1, 0, -2, 144, -144, 0, -1442, 1442, 5]),
    }
    q = choose(Array((7, 3), [0.0] * 21), [-1.0, 2.0, 0.5, 1.0, -0.25])
    k = choose(q, [0.25, 100.0, -100.0, 1.0, -1.0])
    add("state, packed, exp", q, k, dice.array(7, 2), "exp", state=given, cu_seqlens=cuts)
    given = {"kv": dice.array(2, 3, 2), "k_sum": positive(dice.array(2, 3)), "log_scale": None}
    add(
        "state, grouped",
        dice.array(4, 5, 3),
        dice.array(2, 5, 3),
        dice.array(2, 5, 2),
        state=given,
        causal=True,
        enable_gqa=True,
    )
    for earlier, later in ((100.0, -100.0), (-100.0, 100.0), (-1000.0, 1000.0)):
        before = {
            "k": choose(Array((4, 3), [0.0] * 12), [earlier, earlier - 4, 0.0, 1.0, earlier]),
            "v": dice.array(4, 2),
        }
        k = choose(Array((5, 3), [0.0] * 15), [later, later + 4, 0.0, -1.0])
        q = choose(k, [0.0, 1.0, -1.0, -100.0, 100.0])
        name = f"continued from {earlier:g} to {later:g}"
        add(name, q, k, dice.array(5, 2), "exp", causal=True, earlier=before)
        add(f"{name}, all", q, k, dice.array(5, 2), "exp", earlier=before)
    names = [case["name"] for case in made]
    assert len(set(names)) == len(names)
    return made


def dice_self(dice, n, d_k, d_v, lead=()):
    """q, k and v of one length."""
    return dice.array(*lead, n, d_k), dice.array(*lead, n, d_k), dice.array(*lead, n, d_v)


def last_huge(dice, size):
    q, k, v = dice_self(dice, 5, 2, 2)
    k.data[-2:] = [size, size]
    return q, k, v


def positive(array):
    return Array(array.shape, [abs(x) + 0.0625 for x in array.data])


# ------------------------------------------------------------------------------------- the file


def plain(x):
    if isinstance(x, Array):
        return {"shape": list(x.shape), "data": x.data}
    if isinstance(x, dict):
        return {key: plain(value) for key, value in x.items()}
    return x


def check_inputs(case):
    """Every number has at most eight significant bits and lies in float16's normal range."""
    arrays = [case[name] for name in "qkv"]
    for part in (case["state"], case["earlier"]):
        arrays += [a for key, a in (part or {}).items() if a is not None and key != "log_scale"]
    for x in itertools.chain.from_iterable(a.data for a in arrays):
        m, e = mp.frexp(mpf(x))
        assert m * 256 == int(m * 256), (case["name"], x)
        assert x == 0 or -13 <= e <= 16, (case["name"], x)


def text(solved):
    """One line an entry, so that a change can be read in a diff."""
    lines = []
    for case in solved:
        entries = [f"  {json.dumps(key)}: {json.dumps(plain(case[key]))}" for key in case]
        lines.append("{\n" + ",\n".join(entries) + "\n}")
    return "[\n" + ",\n".join(lines) + "\n]\n"


def main():
    made = cases()
    for case in made:
        check_inputs(case)
        solve(case)
    new = text(made)
    if "--check" in sys.argv[1:]:
        if PATH.read_text() != new:
            sys.exit(f"{PATH.name} is not what this script computes")
        print(f"{PATH.name}: {len(made)} cases, as computed")
        return
    PATH.write_text(new)
    print(f"{PATH.name}: {len(made)} cases, {len(new):,} bytes")


if __name__ == "__main__":
    main()
