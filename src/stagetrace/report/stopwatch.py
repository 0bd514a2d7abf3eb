"""The stopwatch of one request, on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..model import RequestRecord, StageRecord
from ..stages import BY_KEY

#: The reference request by stage: 2,000 prompt tokens, 300 output tokens, an idle server with an 8B model, 1,883 ms.
REFERENCE_MS = {
    "http_receive": 0.2, "chat_template": 0.1, "tokenize": 2.0, "admission": 0.1, "kv_allocate": 0.1,
    "embedding": 0.1, "prefill": 86.4, "lm_head": 0.1, "sample": 0.2, "detokenize": 0.2, "decode": 1794.0,
    "teardown": 0.1,
}  # fmt: skip
_BAR = 24


def reference_shares(kind: str) -> dict[str, float]:
    """Each stage's share (0 to 1) of the reference request's total, in one of the demo's four kinds.

    ``cold`` is the reference itself; ``warm`` has 1,900 prompt tokens cached; ``loaded`` has a TTFT of 600 ms, the
    rest of which is waiting; ``short`` stops after 20 tokens, 19 passes of 6 ms after a TTFT of 89 ms.
    """
    changed = {
        "cold": {}, "warm": {"prefill": 4.0}, "loaded": {"admission": 600.0 - 89.0}, "short": {"decode": 19 * 6.0}
    }[kind]  # fmt: skip
    values = {**REFERENCE_MS, **changed}
    total = sum(values.values())
    return {key: ms / total for key, ms in values.items()}


def stopwatch(record: RequestRecord, title: str, reference: Mapping[str, float] | None = None) -> RenderableType:
    """The twelve rows of ``record``, with the shares of ``reference`` beside its own when given."""
    table = Table(title=Text(title, style="bold"), title_justify="left", box=None, pad_edge=False)
    for name, right in (("#", True), ("stage", False), ("start ms", True), ("ms", True), ("share", True)):
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    if reference:
        table.add_column("reference", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("facts", overflow="fold", style="dim")
    for row in record.stages:
        table.add_row(*_cells(row, record.e2e_ms, reference))
    return Group(table, Text(summary(record)), Text(""))


def _cells(row: StageRecord, e2e: float | None, reference: Mapping[str, float] | None) -> list[str]:
    share = row.duration_ms / e2e if row.duration_ms is not None and e2e else None
    cells = [
        str(row.number), row.key,
        f"{row.start_ms:,.2f}" if row.start_ms is not None else "",
        f"{row.duration_ms:,.3f}" if row.duration_ms is not None else row.state,
        f"{share:.1%}" if share is not None else "",
    ]  # fmt: skip
    if reference:
        cells.append(f"{reference[row.key]:.1%}")
    cells.append("█" * round(share * _BAR) if share else "")
    cells.append(facts(row))
    return cells


def facts(row: StageRecord) -> str:
    """A stage's facts in a line; what is unknown is left out."""
    shown = (*BY_KEY[row.key].facts,)
    parts = [_fact(key, row.attributes[key]) for key in shown if row.attributes.get(key) is not None]
    return " ".join(part for part in parts if part)


def _fact(key: str, value: Any) -> str:
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if v and v >= 0.005}
        return " ".join(f"{k}={v:,.1f}" for k, v in sorted(kept.items(), key=lambda item: -item[1]))
    if isinstance(value, float):
        return f"{key}={value:,.2f}"
    return f"{key}={value}"


def summary(record: RequestRecord) -> str:
    """Timers, tokens and coverage of a request in two lines."""
    itl = record.itl_ms
    timers = [
        f"e2e {_ms(record.e2e_ms)}", f"TTFT {_ms(record.ttft_ms)} ({record.ttft_kind or 'none'})",
        f"queue {_ms(record.queue_ms)}", f"prefill {_ms(record.prefill_ms)}",
        f"ITL p50 {_ms(itl.get('p50'))} p95 {_ms(itl.get('p95'))} p99 {_ms(itl.get('p99'))}",
    ]  # fmt: skip
    gaps = sorted(record.gaps_ms.items(), key=lambda item: -item[1])[:3]
    named = ", ".join(f"{name} {_ms(ms)}" for name, ms in gaps if ms >= 0.005)
    covered = "unknown" if record.coverage is None else f"{record.coverage:.1%}"
    ending = f"{record.status}{f' in {record.active_stage}' if record.active_stage else ''}"
    tokens = f"{record.prompt_tokens} prompt tokens ({record.cached_tokens or 0} cached) → {record.output_tokens}"
    rest = f"unattributed {_ms(record.unattributed_ms)}{f' ({named})' if named else ''}"
    return "   ".join(timers) + f"\n   {ending} ({record.finish_reason}); {tokens}; coverage {covered}; {rest}"


def _ms(value: float | None) -> str:
    return "—" if value is None else f"{value:,.2f} ms"
