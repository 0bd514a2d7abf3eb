"""Terminals, pipes and files that know fewer letters than we print: each gets the nearest one it has."""

from __future__ import annotations

import codecs
import os
import sys
from io import FileIO, TextIOWrapper

_LONGEST = 600
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
    """Have stdout and stderr fail for no letter, whatever their encoding, and be there, if nobody is to see them."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started us; no file of ours should get its number
            setattr(sys, name, TextIOWrapper(FileIO(os.devnull, "w")))
    codecs.register_error("stagetrace", _nearest)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="stagetrace")


def plain(line: str) -> str:
    """One line that a terminal can be sent: what is echoed may be an id of 30 kB, or bytes that it would obey."""
    shown = "".join(c if c.isprintable() else _escaped(c) for c in " ".join(line.splitlines()))
    return shown if len(shown) < _LONGEST else shown[:_LONGEST] + "…"


def _escaped(letter: str) -> str:
    """As Python writes it; a byte that was no text, as that byte."""
    return (
        ascii(letter.encode("utf-8", "surrogateescape"))[2:-1]
        if "\udc80" <= letter <= "\udcff"
        else ascii(letter)[1:-1]
    )


def _nearest(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_NEAREST)
    return "".join(c if c.isascii() else "?" for c in text), error.end
