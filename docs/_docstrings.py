"""Docstrings as Markdown, for the reference page.

Ours are written for terminals: a formula stands behind a line of two colons, a legend is a name, a
colon and an indented line, and shapes such as (*batch, D) would begin a stretch of italics.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

FORMULA = re.compile(r"^::\n", re.MULTILINE)
LEGEND = re.compile(r"^([A-Za-z_][\w, ]*):\n((?: {4}.*\n?)+)", re.MULTILINE)
CODE = re.compile(r"(``.+?``|`[^`\n]+`)")
OPAQUE = ("A", "Any", "Array")  # annotations that tell a reader nothing
UNDERLINE = re.compile(r"-{4,}")


def marked(text: str) -> str:
    """A docstring's prose as Markdown; formulas and examples stay as they are."""
    lines = LEGEND.sub(definition, FORMULA.sub("", text)).split("\n")
    described = False  # within a section whose indented lines are prose
    example = False
    made = []
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if UNDERLINE.fullmatch(below):
            described = line != "Examples"
        example = bool(line) and (example or line.startswith(">>>"))
        is_code = example or UNDERLINE.fullmatch(line) or (line[:4] == "    " and not described)
        made.append(line if is_code else plain(line))
    return "\n".join(made)


def definition(found: re.Match[str]) -> str:
    names = ", ".join(f"`{name.strip()}`" for name in found[1].split(","))
    body = " ".join(line.strip() for line in found[2].split("\n") if line.strip())
    return f"{names}\n:   {body}\n\n"


def plain(line: str) -> str:
    """Stars outside code spans are stars, and a leading > is no quotation."""
    parts = CODE.split(line)
    line = "".join(part if i % 2 else part.replace("*", r"\*") for i, part in enumerate(parts))
    return re.sub(r"^(\s*)>", r"\1\\>", line)


class Docstrings(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = marked(obj.docstring.value)
        if obj.is_function:
            for parameter in obj.parameters:
                if str(parameter.annotation) in OPAQUE:
                    parameter.annotation = None
