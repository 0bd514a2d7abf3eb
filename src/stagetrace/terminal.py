"""Terminals, pipes and files that know fewer letters than we print: each gets the nearest one it has."""

from __future__ import annotations

import codecs
import sys
from io import TextIOWrapper

_NEAREST = str.maketrans(
    {
        "—": "-",
        "→": ">",
        "×": "x",
        "…": "~",
        "·": ".",
        "█": "#",
        "≥": ">",
        "²": "2",
    }  # one for one: columns stay in line
)


def spare() -> None:
    """Have stdout and stderr fail for no letter, whatever their encoding."""
    codecs.register_error("stagetrace", _nearest)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="stagetrace")


def _nearest(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_NEAREST)
    return "".join(c if c.isascii() else "?" for c in text), error.end
