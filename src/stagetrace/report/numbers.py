"""The numbers of a run, on a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text


def context_line(context: dict[str, Any], percentile: str = "p50/p95/p99") -> str:
    """The four facts without which a latency is no measurement, and what was measured."""
    caching = {True: "on", False: "off", None: "unknown"}[context["prefix_caching"]]
    return (
        f"{context['engine']} {context['engine_version']}, model {context['model']}, "
        f"GPU {context['gpu'] or 'none'}, {context['requests']} requests: "
        f"request rate {_n(context['request_rate'])}/s, concurrency {_n(context['concurrency'])}, "
        f"percentiles {percentile}, prefix caching {caching}; "
        f"prompt tokens {_q(context['prompt_tokens'])}, output tokens {_q(context['output_tokens'])}"
    )


def numbers_table(document: dict[str, Any]) -> RenderableType:
    """Timers, gauges and stages, with the context above them."""
    table = Table(box=None, pad_edge=False)
    for name in ("", "p50", "p95", "p99", "max"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    for key, values in document["timers"].items():
        table.add_row(key, *(_n(values[q]) for q in ("p50", "p95", "p99")), "")
    for key, values in document["gauges"].items():
        if isinstance(values, dict):
            table.add_row(key, *(_n(values[q]) for q in ("p50", "p95", "p99", "max")))
        else:
            table.add_row(key, str(values), "", "", "")
    return Group(Text("The numbers", style="bold"), Text(context_line(document["context"])), table)


def _n(value: float | None) -> str:
    return "—" if value is None else f"{value:,.2f}"


def _q(values: dict[str, float | None]) -> str:
    return "/".join("—" if v is None else f"{v:,.0f}" for v in values.values())
