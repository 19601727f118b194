"""Does order="auto" take at most 1.05 times what the better order takes?

The default map, and the Taylor map with a closed form (its features packed and not), one head, full
and causal. auto meets each order in turns of its own, and the larger of its two ratios is that to
the better order; where auto takes that one, both sides run the same code, and what differs from 1
is choosing, and noise. `plan` counts operations, making features among them, and knows no rates:
around the length where its two counts are equal, rows without a target show what the clock says of
both orders, and what auto loses by its choice where the other order is the faster one.

The public call offers no causal order to choose between. With a closed form auto has the choice all
the same, chunks with a state or one chunk without, and both are taken here by answering for the
rule; for other maps the causal form is the linear order.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

from _common import D, Options, Report, Side, at_most, median, qkv, race, ratios, run
from _common import seconds as written

from linattn import feature_maps, linear_attention, plan

rules: Any = importlib.import_module(plan.__module__)  # whose name is the function's, too

MAPS = ("elu1", "taylor", "taylor(packed=False)")
NEAR = (0.8, 1.0, 1.25)  # parts of the length at which both counts are equal
LONG = 8192  # positions beyond which the order not taken has few turns, of seconds each


def one_chunk(call: Side) -> Side:
    """The causal call as if the rule had found one chunk cheaper."""

    def side() -> object:
        rule = rules.prefers_one_chunk
        rules.prefers_one_chunk = lambda *sizes: True
        try:
            return call()
        finally:
            rules.prefers_one_chunk = rule

    return side


def sides(found: Any, n: int, causal: bool) -> dict[str, Side]:
    """auto, linear, and quadratic where there is such a choice."""
    q, k, v = qkv(1, n, D)
    call = functools.partial(linear_attention, q, k, v, found, causal=causal)
    made: dict[str, Side] = {"auto": call, "linear": functools.partial(call, order="linear")}
    if not causal:
        made["quadratic"] = functools.partial(call, order="quadratic")
    elif found.closed_form:
        made["quadratic"] = one_chunk(call)
    return made


def near(
    report: Report, o: Options, label: str, made: dict[str, Side], taken: str, **about: Any
) -> None:
    """Linear over quadratic, and the order taken over the other where that is the faster one."""
    times = race({order: side for order, side in made.items() if order != "auto"}, o)
    over = ratios(times["linear"], times["quadratic"])
    lost = median(over) if taken == "linear" else 1 / median(over)
    report.row(
        f"{label}: linear over quadratic", over, "x", None,
        f"{taken} taken, at {max(lost, 1):.2f}x; "
        + ", ".join(f"{order} {written(median(t))}" for order, t in times.items()),
        taken=taken, lost=max(lost, 1.0), **about,
    )  # fmt: skip


def measure(report: Report, o: Options) -> None:
    few = dataclasses.replace(o, rounds=min(o.rounds, 3))
    many = o if o.quick else dataclasses.replace(o, rounds=3 * o.rounds, turn=o.turn / 3)
    for name in MAPS:
        found = feature_maps.get(name)
        for causal in (False, True):
            form = "causal" if causal else "full"
            price = functools.partial(
                plan, d_k=D, D=found.width(D), causal=causal, closed_form=found.closed_form,
                row_operations=found.row_operations(D),
            )  # fmt: skip
            report.heading(f"{name}, {form}, 1 head x n, float32, d = {D}")
            for n in (16, 128) if o.quick else (128, 1024, 16384):
                made, taken = sides(found, n, causal), price(n, n).order
                auto = made.pop("auto")
                over, took = {}, {}
                for order, side in made.items():
                    turns = many if n <= LONG else o if order == taken else few
                    times = race({"auto": auto, "order": side}, turns)
                    over[order] = ratios(times["auto"], times["order"])
                    took[order] = median(times["order"])
                better = max(over, key=lambda order: median(over[order]))
                report.row(
                    f"{name}, {form}, {n:,}: auto over the better order", over[better], "x",
                    at_most(1.05), f"{taken} taken; " + ", ".join(
                        f"{order} {written(t)}" for order, t in took.items()
                    ), n=n, heads=1, map=name, form=form, taken=taken, better=better,
                )  # fmt: skip
            if len(made) > 1:
                equal = price(1, 1).crossover
                for part in NEAR:
                    n = 16 if o.quick else round(part * equal)
                    near(report, o, f"{name}, {form}, {n:,}, {part:g} x that of equal counts",
                         sides(found, n, causal), price(n, n).order, n=n, heads=1, map=name,
                         form=form, part=part)  # fmt: skip


if __name__ == "__main__":
    run("orders", __doc__, measure)
