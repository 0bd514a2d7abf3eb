"""The stopwatch of one request, on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from ..model import RequestRecord, StageRecord
from ..stages import BY_KEY, FLOOR

#: The reference request by stage: 2,000 prompt tokens, 300 output tokens, an idle server with an 8B model, 1,883 ms.
REFERENCE_MS = {
    "http_receive": 0.2, "chat_template": 0.1, "tokenize": 2.0, "admission": 0.1, "kv_allocate": 0.1,
    "embedding": 0.1, "prefill": 86.4, "lm_head": 0.1, "sample": 0.2, "detokenize": 0.2, "decode": 1794.0,
    "teardown": 0.1,
}  # fmt: skip
#: Its TTFT as it states it.
REFERENCE_TTFT_MS = 89.0
#: From this width on the facts stand beside the figures, else below them.
WIDE = 140
_BAR = 24
_INDENT = 4
_ASCII = str.maketrans({"█": "#", "…": "~", "→": ">", "—": "-", "×": "x"})


def reference_shares(kind: str) -> dict[str, float]:
    """Each stage's share (0 to 1) of the reference request's total, in one of the demo's four kinds.

    ``cold`` is the reference itself; ``warm`` has 1,900 prompt tokens cached; ``loaded`` has a TTFT of 600 ms, the
    rest of which is waiting; ``short`` stops after 20 tokens, 19 passes of 6 ms after a TTFT of 89 ms.
    """
    changed = {
        "cold": {}, "warm": {"prefill": 4.0}, "loaded": {"admission": 600.0 - REFERENCE_TTFT_MS},
        "short": {"decode": 19 * 6.0},
    }[kind]  # fmt: skip
    values = {**REFERENCE_MS, **changed}
    total = sum(values.values())
    return {key: ms / total for key, ms in values.items()}


def stopwatch(record: RequestRecord, title: str, reference: Mapping[str, float] | None = None) -> Stopwatch:
    """The twelve rows of ``record``, with the shares of ``reference`` beside its own when given."""
    return Stopwatch(record, title, reference)


@dataclass
class Stopwatch:
    """What :func:`stopwatch` makes; it fits itself to the terminal it is printed on."""

    record: RequestRecord
    title: str
    reference: Mapping[str, float] | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.lines(options.max_width):
            line.no_wrap = True
            line.truncate(options.max_width, overflow="ellipsis")
            if options.ascii_only:
                line.plain = line.plain.translate(_ASCII)
            yield line

    def lines(self, width: int) -> Iterator[Text]:
        """The title, a header, a line or more for each stage, the summary, and an empty line."""
        for line in _wrapped(Text(self.title), width, 0):
            yield Text(line.plain, style="bold")
        rows = [self._cells(row) for row in self.record.stages]
        header = ["#", "stage", "start (ms)", "time (ms)", "share (%)"]
        header += ["ref (%)"] if self.reference else []
        header += ["× floor"] if self._floors else []
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        bar = min(_BAR, max(width - sum(widths) - 2 * len(widths), 0))
        yield Text(_aligned(header, widths), style="bold")
        for stage, cells in zip(self.record.stages, rows, strict=True):
            text = _aligned(cells, widths) + "  " + self._bar(stage, bar)
            yield from _with_facts(text, facts(stage), sum(widths) + 2 * len(widths) + bar + 2, width)
        for part in summary(self.record):
            yield from _wrapped(Text(part), width, 0)
        yield Text("")

    def _cells(self, row: StageRecord) -> list[str]:
        share = self._share(row)
        cells = [
            str(row.number), row.key,
            f"{row.start_ms:,.2f}" if row.start_ms is not None else "",
            f"{row.duration_ms:,.3f}" if row.duration_ms is not None else row.state,
            f"{share:.1%}"[:-1] if share is not None else "",
        ]  # fmt: skip
        if self.reference:
            cells.append(f"{self.reference[row.key]:.1%}"[:-1])
        if self._floors:
            over = row.attributes.get("over_floor")
            cells.append("" if over is None else figure(over))
        return cells

    @property
    def _floors(self) -> bool:
        """Whether it is known of any stage how far it is from what the hardware could do."""
        return any(row.attributes.get("over_floor") is not None for row in self.record.stages)

    def _share(self, row: StageRecord) -> float | None:
        whole = self.record.e2e_ms
        return row.duration_ms / whole if row.duration_ms is not None and whole else None

    def _bar(self, row: StageRecord, width: int) -> str:
        return "█" * min(round((self._share(row) or 0.0) * width), width)


def _aligned(cells: list[str], widths: list[int]) -> str:
    """The cells in columns: the stage's name to the left, numbers to the right."""
    columns = zip(cells, widths, strict=True)
    return "  ".join(cell.ljust(w) if index == 1 else cell.rjust(w) for index, (cell, w) in enumerate(columns))


def _with_facts(line: str, parts: list[str], column: int, width: int) -> Iterator[Text]:
    """A stage's line and its facts: beside it where there is room, else below it, each part in a line of its own."""
    if width < WIDE:
        yield Text(line.rstrip())
        for part in parts:
            for more in _wrapped(Text(part), width, _INDENT):
                yield Text(more.plain, style="dim")
        return
    beside = list(_wrapped(Text("   ".join(parts)), width, column))
    yield Text.assemble(line.ljust(column), (beside[0].plain[column:], "dim"))
    for more in beside[1:]:
        yield Text(more.plain, style="dim")


def _wrapped(text: Text, width: int, column: int) -> Iterator[Text]:
    """``text`` in lines from ``column`` on, broken between words."""
    line = ""
    for word in text.plain.split(" "):
        if line and column + len(line) + 1 + len(word) > width:
            yield Text(" " * column + line)
            line = ""
        line = f"{line} {word}" if line else word
    yield Text(" " * column + line)


def facts(row: StageRecord) -> list[str]:
    """A stage's facts in a line, and each breakdown of its time in another; what is unknown is left out."""
    names = [key for key in BY_KEY[row.key].facts if key != "over_floor"]  # which has a column of its own
    known = [(key, row.attributes[key]) for key in names if row.attributes.get(key) is not None]
    plain = " ".join(_fact(key, value) for key, value in known if not isinstance(value, dict | list))
    if row.attributes.get("interrupted"):
        plain = f"interrupted {plain}".rstrip()
    broken = [_breakdown(key, value) for key, value in known if isinstance(value, dict)]
    listed = [_LISTED[key](value) for key, value in known if value and isinstance(value, list)]
    return [part for part in (plain, *broken, *listed, _cards(row.attributes.get("gpu"))) if part]


def _fact(key: str, value: Any) -> str:
    if not isinstance(value, float):
        return f"{key}={value}"
    return f"{key}={figure(value)}" if key in FLOOR else f"{key}={value:,.2f}"


def figure(value: float) -> str:
    """A figure of any size: three digits at least."""
    return f"{value:,.1f}" if value >= 100 else f"{value:,.2f}" if value >= 10 else f"{value:.3g}"


def _breakdown(key: str, value: dict[str, float | None]) -> str:
    """Parts of a time, the largest first; percentiles in their own order."""
    kept = [(k, v) for k, v in value.items() if v is not None and v >= 0.005]
    if "p50" not in value:
        kept.sort(key=lambda item: -item[1])
    return f"{key}: " + " ".join(f"{k}={v:,.2f}" for k, v in kept) if kept else ""


def _culprits(value: list[dict[str, Any]]) -> str:
    return "stalled_by_ms: " + " ".join(f"{c['request_id']}={c['ms']:,.2f} ({c['tokens']:,} tokens)" for c in value)


def _worst(value: list[dict[str, Any]]) -> str:
    """The longest waits first, each behind the index of the token that was waited for."""
    steps = sorted(value, key=lambda step: -step["gap_ms"])
    return "worst_ms: " + " ".join(f"#{step['token']}={step['gap_ms']:,.2f} ({step['cause']})" for step in steps)


def _cards(seen: dict[str, Any] | None) -> str:
    """What the GPUs did in a stage's own time; nothing of one that is shorter than a sample."""
    if not seen or seen["window"] not in ("sampled", "stale"):
        return ""
    means = (
        ("utilization", "busy={:.0%}"), ("memory_bandwidth_utilization", "memory_busy={:.0%}"), ("power_w", "W={:.0f}"),
        ("sm_clock_mhz", "MHz={:.0f}"), ("temperature_c", "°C={:.0f}"),
    )  # fmt: skip
    parts = [text.format(seen[counter]["mean"]) for counter, text in means if seen[counter]]
    parts += [f"J={seen['energy_j']:,.1f}"] if seen["energy_j"] is not None else []
    parts += [f"throttled={seen['throttle_reasons']}"] if seen["throttled"] else []
    return f"gpu{' (stale)' if seen['window'] == 'stale' else ''}: " + " ".join(parts)


#: How lists are put in words.
_LISTED = {"stalled_by": _culprits, "worst_steps": _worst}


def summary(record: RequestRecord) -> list[str]:
    """Timers, tokens and coverage of a request, a line each."""
    itl = record.itl_ms
    gaps = sorted(record.gaps_ms.items(), key=lambda item: -item[1])[:3]
    named = ", ".join(f"{name} {_ms(ms)}" for name, ms in gaps if ms >= 0.005)
    covered = "unknown" if record.coverage is None else f"{record.coverage:.1%}"
    ending = f"{record.status}{f' in {record.active_stage}' if record.active_stage else ''}"
    cached = "unknown" if record.cached_tokens is None else record.cached_tokens
    return [
        f"e2e {_ms(record.e2e_ms)}, TTFT {_ms(record.ttft_ms)} ({record.ttft_kind or 'none'}), "
        f"queue {_ms(record.queue_ms)}, prefill {_ms(record.prefill_ms)}",
        f"ITL p50 {_ms(itl.get('p50'))}, p95 {_ms(itl.get('p95'))}, p99 {_ms(itl.get('p99'))}, "
        f"max {_ms(itl.get('max'))}",
        f"{ending} ({_why(record)}): {_n(record.prompt_tokens)} prompt tokens "
        f"({cached} cached) → {_n(record.output_tokens)} output tokens",
        f"coverage {covered}, unattributed {_ms(record.unattributed_ms)}{f' ({named})' if named else ''}",
        *([_energy(record.gpu)] if record.gpu else []),
    ]


def _why(record: RequestRecord) -> str:
    """What ended it: the finish reason, or the answer's status and the kind of error."""
    status = f"HTTP {record.http_status}" if (record.http_status or 0) >= 400 else ""
    kind = record.error_type if record.error_type != str(record.http_status) else ""
    return record.finish_reason or ", ".join(filter(None, (status, kind))) or "no finish reason"


def _energy(share: dict[str, Any]) -> str:
    """A request's share of the cards' energy, and whether they could run as fast as they can."""
    joules, each = share["joules"], share["joules_per_output_token"]
    said = "energy unknown" if joules is None else f"energy {joules:,.2f} J"
    said += "" if each is None else f" ({each:,.3f} J per output token)"
    slow = {True: f"throttled ({share['throttle_reasons']})", False: "not throttled", None: "throttling unknown"}
    return f"{said}, {slow[share['throttled']]}"


def _ms(value: float | None) -> str:
    return "—" if value is None else f"{value:,.2f} ms"


def _n(value: int | None) -> str:
    return "—" if value is None else f"{value:,}"
