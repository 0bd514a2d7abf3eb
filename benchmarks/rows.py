"""Which rows there are. Their modules are imported only in the process that runs them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from .figures import Options, Outcome, Progress


@dataclass(frozen=True)
class Row:
    """One row: ``key`` for ``--only``, the module that measures it, and about how long it takes.

    A ``long`` one is measured only where ``--only`` names it.
    """

    key: str
    title: str
    seconds: int
    long: bool = False

    def run(self, options: Options, progress: Progress) -> Outcome:
        """Measure, in this process."""
        outcome: Outcome = import_module(f"{__package__}.row_{self.key}").run(options, progress)
        return outcome


ROWS = (
    Row("mark", "a mark against an OpenTelemetry span, and against reading the clock", 3),
    Row("step", "what the hooks add to a real step of the engine's scheduler, batch 1 to 256", 110),
    Row("send", "what is added to each streamed chunk in the API process", 2),
    Row("import", "import stagetrace against an interpreter that does nothing", 4),
    Row("collector", "the collector: marks per second, and its share of a core", 15),
    Row("gpu", "the GPU sampler's share of a core, eight cards", 55),
    Row("truth", "coverage of real requests, and their times against a client's own", 150),
    Row("servers", "CPU per streamed token of real servers, untraced and traced by turns", 150),
    Row("endpoints", "collectors under load, their OTLP endpoints bad in every way", 615, long=True),
    Row("bad_endpoint", "real servers whose OTLP endpoint is bad, beside a good one and none", 1600, long=True),
)


def named(key: str) -> Row:
    """The row ``key``; KeyError if there is none."""
    return {row.key: row for row in ROWS}[key]
