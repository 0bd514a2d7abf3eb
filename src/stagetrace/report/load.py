"""What a load came to, on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_EXPLAINED = {
    "chunk_gap_ms": "between two pieces of an answer",
    "late_ms": "sent later than due; the client's own delay",
}


def load_view(document: dict[str, Any], said: str) -> RenderableType:
    """The summary of a client file; ``said`` is what the server said of the first failure."""
    table = Table(box=None, pad_edge=False)
    for name in ("", "p50", "p95", "p99"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    summary = document["summary"]
    for key in ("ttft_ms", "chunk_gap_ms", "e2e_ms", "late_ms"):
        if any(value is not None for value in summary[key].values()):
            table.add_row(key, *(_n(value) for value in summary[key].values()))
    lines: list[RenderableType] = [Text("The client's side", style="bold"), Text(_context(document, summary)), table]
    lines += [Text(f"{key}: {what}.") for key, what in _EXPLAINED.items() if summary[key]["p50"] is not None]
    if summary["failed"]:
        errors = ", ".join(f"{count} × {error}" for error, count in summary["errors"].items())
        lines.append(Text(f"{summary['failed']} requests failed: {errors}" + (f" ({said})" if said else "")))
    if document["interrupted"]:
        lines.append(Text("Interrupted: this is what was done so far."))
    return Group(*lines)


def _context(document: dict[str, Any], summary: dict[str, Any]) -> str:
    caching = {True: "on", False: "off", None: "unknown to a client"}[summary["prefix_caching"]]
    loop = "".join(f"{key} {value:g}" for key, value in document["loop"].items())
    kind = "open" if "rate" in document["loop"] else "closed"
    return (
        f"{document['url']}, model {document['model']}, {kind} loop ({loop}, seed {document['seed']}), "
        f"{summary['requests']} requests answered in {_n(summary['window_s'])} s: "
        f"request rate {_n(summary['request_rate'])}/s, concurrency {_n(summary['concurrency'])}, "
        f"percentiles p50/p95/p99, prefix caching {caching}; prompt tokens {_q(summary['prompt_tokens'])}, "
        f"output tokens {_q(summary['output_tokens'])}, {_n(summary['output_tokens_per_s'])} output tokens/s"
    )


def _n(value: float | None) -> str:
    return "—" if value is None else f"{value:,.2f}"


def _q(values: dict[str, float | None]) -> str:
    return "/".join("—" if v is None else f"{v:,.0f}" for v in values.values())
