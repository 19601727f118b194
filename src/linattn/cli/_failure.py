"""What ends a command with one line."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, NoReturn

__all__ = ["INTERRUPTED", "Failure", "brought", "fail"]

INTERRUPTED = 130  # as shells count a process that SIGINT ended


class Failure(Exception):
    """One line for stderr, and the exit status."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def fail(message: str) -> NoReturn:
    raise Failure(message)


def brought(package: str, by: str, what: str) -> ModuleType | Any:
    """An optional package; without it, a line that says what brings it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        fail(f"{what} needs the package {package.partition('.')[0]} ({error}): pip install {by}")
