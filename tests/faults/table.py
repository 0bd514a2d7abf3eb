"""The bench's tables, on a terminal and as a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.stats import Spread

from .measure import FAIL, PASS, PER_TOKEN, UNCLEAR, Row, landed
from .modes import Shown
from .moved import Moved
from .plugin.stagetrace_faults.places import GAPS, STAGES

COMMAND = 'make faults ARGS="--config all --markdown docs/measurements/faults.md"'
RULE = (
    "Times in ms, per request; medians, delayed less control, pair by pair. injected: how long the delays really were. "
    "client: how much longer the request was by its client's clock. stage: the change where the delay must land, then "
    "where four fifths of the pairs lie. elsewhere: the absolute changes of the other stages and of what is "
    "unattributed, summed, and as a share of the client's change. PASS: the stage's change is the client's to 10 % or "
    "1 ms, that of its part (of the stage itself if it has none) what was injected to 10 % or 1 ms, and elsewhere is "
    "at most 5 % or 1 ms. The 1 ms is the machine's noise: requests that nobody delays differ by about as much. "
    "FAIL: even the near end of the 95 % interval of the median is beyond that. unclear: beyond it, but not surely."
)
STYLES = {PASS: "green", FAIL: "bold red", UNCLEAR: "yellow"}
#: Of the columns below, those that a terminal has room for.
NARROW = ("delayed at", "injected", "client", "stage", "elsewhere", "verdict")
WIDE = (
    "delayed at", "by", "lands in", "injected", "client", "stage", "p10 – p90", "part", "elsewhere", "pairs", "verdict"
)  # fmt: skip
MOVED = ("delayed at", "control delayed at", "by", "stage", "the control's", "elsewhere", "pairs", "verdict")
MOVED_RULE = (
    "The same beside a control that waits as long, at the place before. A request that has waited is slower in what "
    "comes after it, wherever the wait was; here that cancels out, and what is elsewhere is time under a wrong name. "
    "PASS: the stage's change and that of the control's stage are the delay to 10 % or 1 ms, and elsewhere is at most "
    "5 % or 1 ms."
)
SHOWN = ("what the records show", "expected", "found", "p10 – p90", "verdict")


@dataclass
class Results:
    """What was measured in one layout."""

    layout: str
    about: str
    rows: list[Row] = field(default_factory=list)
    shown: list[Shown] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)

    @property
    def verdicts(self) -> set[str]:
        """All that there were."""
        return {each.verdict for each in (*self.rows, *self.shown, *self.moved)}

    @property
    def summary(self) -> str:
        """How many stages and gaps the delays landed in, at every size."""
        sizes = ", ".join(f"{size:g}" for size in sorted({row.size_ms for row in self.rows}))
        done = {row.place.name for row in self.rows}
        stages, gaps = ([name for name in names if name in done] for names in (STAGES, GAPS))
        return (
            f"{landed(self.rows, stages)} of {len(stages)} stages and {landed(self.rows, gaps)} of {len(gaps)} "
            f"places of no stage, at {sizes} ms"
        )


def cells(row: Row) -> dict[str, str]:
    """One row, by ``WIDE``."""
    own, client = row.changes[row.place.lands], row.client.value
    return {
        "delayed at": row.place.name,
        "by": f"{row.size_ms * PER_TOKEN:g} a token" if row.place.per_token else f"{row.size_ms:g}",
        "lands in": row.place.lands,
        "injected": _n(row.injected.value),
        "client": _n(client),
        "stage": _n(own.value),
        "p10 – p90": _between(own),
        "part": f"{row.place.part} {_n(row.site.value)}" if row.place.part else "",
        "elsewhere": f"{row.elsewhere_ms:.2f} ({row.elsewhere_ms / client:.0%})",
        "pairs": str(len(row.pairs)),
        "verdict": row.words,
    }


def moved_cells(row: Moved) -> dict[str, str]:
    """One row of the table with delayed controls, by ``MOVED``."""
    changes = row.changes
    return {
        "delayed at": row.place.name,
        "control delayed at": row.other.name,
        "by": f"{row.size_ms:g}",
        "stage": _n(changes[row.place.lands].value),
        "the control's": _n(changes[row.other.lands].value),
        "elsewhere": f"{row.elsewhere_ms:.2f} ({row.elsewhere_ms / row.size_ms:.0%})",
        "pairs": str(len(row.pairs)),
        "verdict": row.words,
    }


def shown_cells(shown: Shown) -> dict[str, str]:
    """One line of the second table, by ``SHOWN``."""
    found = shown.found
    return dict(
        zip(SHOWN, (shown.what, _n(shown.expected), _n(found.value), _between(found), shown.verdict), strict=True)
    )


def show(console: Console, results: Results) -> None:
    """Print the tables of one layout."""
    console.print(f"{results.layout}: {results.about}", style="bold", highlight=False)
    console.print(_table(NARROW, map(cells, results.rows)))
    if results.moved:
        console.print(_table(MOVED, map(moved_cells, results.moved)))
    if results.shown:
        console.print(_table(SHOWN, map(shown_cells, results.shown)))
    console.print(results.summary, style="bold", highlight=False)


def _table(heads: Sequence[str], rows: Iterable[dict[str, str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in heads:
        table.add_column(head, justify="left" if head in (heads[0], "verdict") else "right")
    for row in rows:
        verdict = Text(row["verdict"], STYLES[row["verdict"].partition(":")[0]])
        table.add_row(*(row[head] for head in heads[:-1]), verdict)
    return table


def page(found: Sequence[Results], where: dict[str, str]) -> str:
    """A page for the repository."""
    return "\n".join(_lines(found, where)) + "\n"


def _lines(found: Sequence[Results], where: dict[str, str]) -> Iterator[str]:
    yield f"<!-- Generated by `{COMMAND}`; not edited by hand. -->"
    yield "# Does time land in the stage it belongs to?"
    yield ""
    packages = ", ".join(f"{name} {value}" for name, value in where.items() if name not in ("date", "cpu"))
    yield (
        f"Measured {where['date']} on {where['cpu']} ({packages}), a machine shared with other work. A real server is "
        "made slow at a known place by a known time, for every other request, one request at a time "
        "([how](../../tests/faults/README.md))."
    )
    yield ""
    yield RULE
    for results in found:
        yield f"\n## {results.layout}: {results.about}\n"
        yield f"**{results.summary}.**\n"
        yield from _markdown(WIDE, map(cells, results.rows))
        if results.moved:
            yield f"\n{MOVED_RULE}\n"
            yield from _markdown(MOVED, map(moved_cells, results.moved))
        if results.shown:
            yield ""
            yield from _markdown(SHOWN, map(shown_cells, results.shown))


def _markdown(heads: Sequence[str], rows: Iterable[dict[str, str]]) -> Iterator[str]:
    yield "| " + " | ".join(heads) + " |"
    words = (heads[0], "control delayed at", "lands in", "part", "verdict")
    yield "|" + "|".join("---" if head in words else "---:" for head in heads) + "|"
    for row in rows:
        yield "| " + " | ".join(row[head] for head in heads) + " |"


def _n(value: float) -> str:
    return f"{value:,.2f}"


def _between(spread: Spread) -> str:
    return f"{_n(spread.p10)} – {_n(spread.p90)}"
