"""`linattn info`: what is in use, what is missing, and how to get it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from typing import Annotated, Any

import typer

from linattn import feature_maps, show_config

__all__ = ["info"]

# package -> (what it is for, what to give to pip to have it)
OPTIONAL = {
    "ml_dtypes": ("bfloat16 arrays", "'linattn[cli]'"),
    "safetensors": (".safetensors files", "'linattn[cli]'"),
    "matplotlib": ("pictures (--plot)", "'linattn[cli]'"),
    "torch": ("PyTorch tensors and layers", "'linattn[torch]'"),
}
VARIABLES = (
    "LINATTN_ISA",
    "LINATTN_BACKEND",
    "LINATTN_REQUIRE_NATIVE",
    "OMP_NUM_THREADS",
)


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Version, instruction set, threads, backends, and what is missing."""
    config = show_config()
    found: dict[str, str | None] = {name: _version(name) for name in OPTIONAL}
    variables = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    if as_json:
        about: dict[str, Any] = {
            "version": config.version,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "numpy": config.numpy,
            "backend": config.backend,
            "instruction_set": config.instruction_set,
            "instruction_sets": config.instruction_sets,
            "threads": config.threads,
            "remedy": config.remedy,
            "feature_maps": feature_maps.names(),
            "optional": found,
            "environment": variables,
        }
        print(json.dumps(about, indent=2))
        return
    families = [name for name in feature_maps.catalogue() if name not in feature_maps.names()]
    native = config.instruction_set is not None
    rows = [
        ("linattn", config.version),
        ("Python", f"{platform.python_version()} ({sys.executable})"),
        ("NumPy", config.numpy),
        ("platform", platform.platform()),
        (
            "compiled core",
            f"{config.instruction_set} in use, of {', '.join(config.instruction_sets)} built in"
            if native
            else "missing: the slower array backend serves",
        ),
        ("backend", f"{config.backend} answers first" if native else config.backend),
        ("threads", f"{config.threads}, of {os.cpu_count()} processors"),
        ("feature maps", f"fused: {', '.join(feature_maps.names())}"),
        ("", f"families: {', '.join(families)}; or any callable"),
        *((name, f"{value} (environment)") for name, value in variables.items()),
    ]
    for name, (purpose, source) in OPTIONAL.items():
        version = found[name]
        rows.append(
            (name, f"{version}, for {purpose}")
            if version
            else (name, f"missing, for {purpose}: pip install {source}")
        )
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")
    if config.remedy:
        print(f"\nTo get the fast one: {config.remedy}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
