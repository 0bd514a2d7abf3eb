"""What the gate looks at: the timers of a request, its twelve stages, and what lies between them."""

from __future__ import annotations

from dataclasses import dataclass

from ..stages import STAGES


@dataclass(frozen=True)
class Measure:
    """One duration of a request, in ms. ``of`` is the timer that it is a part of; None for a timer.

    ``judged`` measures make a verdict; the others are kept because budgets and people ask for them.
    """

    key: str
    of: str | None = None
    judged: bool = True
    #: A change below this is no news, whatever it is in percent.
    least_ms: float = 0.2

    @property
    def title(self) -> str:
        """What a person calls it."""
        return TITLES.get(self.key, self.key)


TITLES = {
    "ttft_ms": "TTFT",
    "itl_ms": "inter-token",
    "prefill_ms": "prefill time",
    "queue_ms": "queue",
    "e2e_ms": "e2e",
}
#: Waiting and prefill are timers, too, but those are stages 4 and 7 in other words.
TIMERS = (
    Measure("ttft_ms"),
    Measure("itl_ms", least_ms=0.05),
    Measure("prefill_ms", judged=False),
    Measure("queue_ms", judged=False),
    Measure("e2e_ms"),
)
#: Stages up to the first text are parts of the time to it.
LAST_OF_TTFT = 10
PARTS = (
    *(Measure(s.key, "ttft_ms" if s.number <= LAST_OF_TTFT else "e2e_ms") for s in STAGES),
    Measure("unattributed", "e2e_ms"),
)
MEASURES = (*TIMERS, *PARTS)
BY_KEY = {measure.key: measure for measure in MEASURES}
STAGE_KEYS = tuple(stage.key for stage in STAGES)
