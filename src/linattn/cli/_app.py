"""All commands under one name, and the one place where errors become a line and a status."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from . import attend, bench, demo, explain, fidelity, info
from ._failure import INTERRUPTED, Failure

__all__ = ["app", "run"]

OPTIONS = {  # what the library calls by its own names
    "enable_gqa": "--gqa",
    "eps": "--eps",
    "feature_map": "--feature-map",
    "itemsize": "--itemsize",
    "order": "--order",
    "scale": "--scale",
}

app = typer.Typer(
    name="linattn",
    help="Linear attention, φ(Q)(φ(K)ᵀV) / (φ(Q) φ(K)ᵀ1), at the speed of the matrix multiply.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _flowed(text: str | None) -> str:
    """A docstring as paragraphs without line breaks, to be broken where the terminal ends."""
    return "\n\n".join(" ".join(part.split()) for part in (text or "").split("\n\n"))


for _command in (
    demo.demo,
    attend.attend,
    explain.explain,
    fidelity.fidelity,
    bench.bench,
    info.info,
):
    app.command(help=_flowed(_command.__doc__))(_command)


def _version(wanted: bool) -> None:
    if wanted:
        import linattn

        print(f"linattn {linattn.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command: 0, 1 for a failure, 2 for wrong usage, 130 for an interrupt."""
    with warnings.catch_warnings():
        warnings.showwarning = _note
        return _run(sys.argv[1:] if arguments is None else arguments)


def _run(arguments: Sequence[str]) -> int:
    given = list(arguments)
    names = {command.callback.__name__ for command in app.registered_commands if command.callback}
    who = " ".join(["linattn", *(name for name in given[:1] if name in names)])
    try:
        status = app(args=given, prog_name="linattn", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone, as in `linattn info | head -n 1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SystemExit as error:  # so does typer, where it meets the same
        return error.code if isinstance(error.code, int) else 1
    except KeyboardInterrupt:
        return _say(who, "interrupted", INTERRUPTED)
    except Exception as error:
        if os.environ.get("LINATTN_TRACEBACK"):
            raise
        return _say(who, *_worded(error, who))
    if status == INTERRUPTED:  # typer has caught it
        return _say(who, "interrupted", INTERRUPTED)
    return status if isinstance(status, int) else 0


def _worded(error: Exception, who: str) -> tuple[str, int]:
    """The line for an error, and the status."""
    if isinstance(error, Failure):
        return str(error), error.status
    if isinstance(error, typer.Abort):
        return "interrupted", INTERRUPTED
    usage: Any = getattr(error, "format_message", None)
    if usage is not None:  # whichever click is behind this typer
        if type(error).__name__ == "NoArgsIsHelpError":
            return f"expected a command; see {who} --help", 2
        return f"{usage().rstrip('.')}; see {who} --help", 2
    if isinstance(error, OSError):
        text = error.strerror or str(error)
        return (f"{os.fspath(error.filename)!s}: {text}" if error.filename else text), 1
    if isinstance(error, MemoryError):
        return f"not enough memory ({error})" if str(error) else "not enough memory", 1
    if isinstance(error, (ValueError, TypeError, ImportError)):  # worded by the library
        return str(error) or type(error).__name__, 1
    return (
        f"unexpected {type(error).__name__}: {error} (this is a fault of linattn; "
        "LINATTN_TRACEBACK=1 shows where)"
    ), 1


def _say(who: str, message: str, status: int) -> int:
    name, colon, rest = message.partition(":")
    message = OPTIONS.get(name, name) + colon + rest
    print(f"{who}: {' '.join(message.split())}", file=sys.stderr)
    return status


def _note(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"linattn: note: {message}", file=sys.stderr)
