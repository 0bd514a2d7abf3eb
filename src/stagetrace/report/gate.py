"""A comparison on a terminal: the verdict, a table, and with ``--explain`` what carried the change."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..gate.compare import Report, Row
from ..gate.decide import BETA, FAIL, FALSE_ALARMS, INCONCLUSIVE, PASS
from ..gate.measures import BY_KEY
from ..gate.output import budget_words, headline, signed

_STYLES = {PASS: "green", FAIL: "bold red", INCONCLUSIVE: "yellow"}


def gate_view(report: Report, explain: bool) -> RenderableType:
    """All of it; the verdict comes last, where a person looks first."""
    parts: list[RenderableType] = [Text(line) for line in _context(report)]
    parts += [_table(report), *(Text(line) for line in _asides(report))]
    if explain:
        parts += [Text(""), *_explained(report)]
    verdict = Text(headline(report))
    verdict.stylize(_STYLES[report.verdict], 0, len(report.verdict))
    return Group(*parts, Text(""), verdict)


def _context(report: Report) -> Iterator[str]:
    before, known = report.sides.baseline[0].fingerprint, dict(report.sides.current[0].fingerprint)
    for name in (line.partition(" ")[0] for line in report.sides.differ):
        known[name] = f"{before.get(name)} → {known.get(name)}"
    runs = f"{report.runs[0]} against {report.runs[1]} runs"
    driven = (
        f"concurrency {known['concurrency']}" if known.get("concurrency") else f"{known.get('request_rate')} requests/s"
    )
    caching = {"1": "on", "0": "off", "None": "unknown"}.get(caching := str(known.get("prefix_caching")), caching)
    yield (
        f"{known.get('engine') or 'engine unknown'} {known.get('engine_version') or ''}, model {known.get('model')}, "
        f"GPU {known.get('gpu') or 'none seen'}, {driven}, prefix caching {caching}, {known.get('prompt_mix')}, "
        f"{known.get('output_tokens')} output tokens; means over requests, {runs}"
    )
    for line in report.sides.differ:
        yield f"differs: {line}"
    yield from report.sides.failed


def _table(report: Report) -> Table:
    # Eighty columns hold it.
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("", "verdict", "base ms", "change %", "at most", "change ms", "noise %", "caught"):
        table.add_column(name, justify="left" if name in ("", "verdict") else "right", no_wrap=True)
    for row in report.rows:
        found, least = row.judged.estimate, row.outcome.detectable
        table.add_row(
            row.measure.title,
            Text(row.outcome.verdict, style=_STYLES[row.outcome.verdict]),
            f"{row.judged.base_ms:,.2f}", signed(row.change * 100, 1), _percent(found.upper(BETA)),
            signed(row.change_ms), "—" if found.noise is None else f"{found.noise * 100:.1f}",
            "—" if least is None else _percent(least),
        )  # fmt: skip
    return table


def _percent(log: float) -> str:
    value = math.expm1(min(log, 700.0)) * 100
    return f"{value:+.1f}" if value < 100 else f"{value:+.0f}" if value < 1000 else "—"


def _asides(report: Report) -> Iterator[str]:
    for row in report.budgets:
        yield f"budget {budget_words(row)}: {row.verdict}"
    if report.unjudged:
        yield "not judged: " + ", ".join(f"{key} ({state})" for key, state in report.unjudged.items())
    yield (
        "at most (%): what the change is surely below, but for 1 in 20; noise: how far runs vary; caught (%): the "
        "least that would be FAIL in 19 of 20 comparisons."
    )
    if report.interleaved:
        yield f"At most {FALSE_ALARMS:.0%} of unchanged ones fail."
    else:
        yield (
            "Fewer than six runs, or sides not run in turn: what drifted on the machine between them cannot be told "
            "from a change (`gate --ab` runs them in turn)."
        )


def _explained(report: Report) -> Iterator[RenderableType]:
    if report.culprit is None:
        yield Text("Nothing is surely slower; the largest changes (ms):", style="bold")
    else:
        yield Text(f"What carried the change: {report.culprit.measure.title}", style="bold")
    parts = [row for row in report.rows if row.measure.of is not None]
    for row in sorted(parts, key=lambda row: -abs(row.change_ms))[:5]:
        yield Text(
            f"  {row.measure.key:<14} {signed(row.change_ms):>9} ms{_of_timer(row, report)}  {row.outcome.verdict}"
        )
    if report.shown:
        yield Text("The requests that show it best (`stagetrace stages FILE --request ID`):", style="bold")
    for shown in report.shown:
        yield Text(
            f"  {shown.before_ms:,.2f} → {shown.after_ms:,.2f} ms, {shown.prompt_tokens:,} prompt tokens: "
            f"{shown.id or shown.prompt} in {shown.run}"
        )


def _of_timer(row: Row, report: Report) -> str:
    """What part of its timer's change it is, where there is one to speak of."""
    timer = next((each for each in report.rows if each.measure.key == row.measure.of), None)
    if timer is None or timer.outcome.verdict != FAIL or timer.change_ms <= 0:
        return ""
    return f" of {signed(timer.change_ms)} ms {BY_KEY[row.measure.of or ''].title}"
