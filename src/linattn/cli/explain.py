"""`linattn explain`: what given sizes cost, before anything is computed."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer

from linattn import feature_maps, get_num_threads, plan

from . import _measure
from ._failure import fail

__all__ = ["explain"]


def explain(
    n: Annotated[int, typer.Option("--n", help="Positions of queries and keys.")] = 128,
    d: Annotated[int, typer.Option("--d", help="Features of a query, key and value.")] = 64,
    n_q: Annotated[int | None, typer.Option(help="Query positions, where not n.")] = None,
    n_k: Annotated[int | None, typer.Option(help="Key positions, where not n.")] = None,
    d_v: Annotated[int | None, typer.Option(help="Features of a value, where not d.")] = None,
    features: Annotated[
        int | None, typer.Option("--features", "-D", help="Features after the map, where not d.")
    ] = None,
    feature_map: Annotated[
        str | None,
        typer.Option(help="φ, by name: its features, and its closed form if it has one."),
    ] = None,
    batch: Annotated[int, typer.Option(help="Key heads in all, over the whole batch.")] = 1,
    groups: Annotated[int, typer.Option(help="Query heads for each key head.")] = 1,
    causal: Annotated[bool, typer.Option("--causal", help="The causal form.")] = False,
    state: Annotated[bool, typer.Option("--state", help="A state comes in or goes out.")] = False,
    order: Annotated[str, typer.Option(help="auto, linear or quadratic.")] = "auto",
    itemsize: Annotated[int, typer.Option(help="Bytes of a number: 2, 4 or 8.")] = 4,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine and predict seconds.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """The plan for given sizes: operations, numbers, bytes, the order taken, the crossover."""
    rates: dict[str, float] = {}
    if measure:
        rates = {"matmul_rate": _measure.matmul_rate(), "copy_rate": _measure.copy_rate()}
    phi = feature_maps.get(feature_map)
    if feature_map is not None and features not in (None, phi.width(d)):
        fail(
            f"--features: expected {phi.width(d):,}, those of --feature-map {feature_map}, or none "
            f"given, got {features:,}"
        )
    found = plan(
        n if n_q is None else n_q,
        n if n_k is None else n_k,
        d,
        d_v,
        D=phi.width(d) if features is None else features,
        closed_form=phi.closed_form,
        row_operations=phi.row_operations(d),
        batch=batch,
        groups=groups,
        causal=causal,
        state=state,
        order=order,
        itemsize=itemsize,
        threads=get_num_threads(),
        matmul_rate=rates.get("matmul_rate"),
        copy_rate=rates.get("copy_rate"),
    )
    if as_json:
        print(json.dumps(dataclasses.asdict(found) | rates, indent=2))
        return
    print(found)
    if rates:
        print(
            f"measured: {rates['matmul_rate'] / 1e9:.3g} GFLOP/s in a float32 matrix product, "
            f"{rates['copy_rate'] / 1e9:.3g} GB/s in a copy"
        )
