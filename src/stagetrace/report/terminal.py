"""Where reports are drawn."""

from __future__ import annotations

from rich.console import Console

#: Columns that the widest table of figures takes.
_FIGURES = 76


def terminal() -> Console:
    """Standard output. Where it is too narrow for figures the terminal wraps them; cut, they would be others."""
    console = Console()
    console.width = max(console.width, _FIGURES)
    return console
