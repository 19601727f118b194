"""The command line: `linattn`. One file a command; typer, rich and matplotlib come by an extra."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `linattn` with these arguments (None: the process's own); returns the exit status."""
    try:
        from . import _app
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("click", "rich", "typer"):
            raise
        print(
            f"linattn: the command line needs the package {package}, which the extra cli brings: "
            "pip install 'linattn[cli]'",
            file=sys.stderr,
        )
        return 1
    return _app.run(arguments)
