"""When each token reached its client: the engine's updates matched with what was sent."""

from __future__ import annotations

from bisect import bisect_left
from statistics import fmean
from typing import NamedTuple

from ..marks import OPERATIONS
from .case import Case
from .life import Turn


class Delivery(NamedTuple):
    """A generated token: booked by the engine and arrived at its client, monotonic ns, and the step it is of."""

    booked: int
    arrived: int
    turn: Turn

    @property
    def lag(self) -> int:
        """From the engine to the client, ns."""
        return self.arrived - self.booked


def deliveries(case: Case) -> list[Delivery]:
    """Each generated token, in order.

    It arrives when it is sent, where it was streamed; else when it has left the detokeniser, which ends TTFT then, too;
    or when the engine has booked it, if neither was seen.
    """
    made = [turn for turn in case.turns if turn.generated and turn.step.update_ns]
    updates = [turn.step.update_ns[1] for turn in made if turn.step.update_ns]
    arrivals = [(case.processed(turn.step) or turn.step.update_ns or (0, 0))[1] for turn in made]
    if case.ttft_kind == "streamed":
        arrivals = sent(arrivals, _chunks(case), case.first_text or 0)
    return [
        Delivery(update, arrival, turn)
        for turn, update, arrival in zip(made, updates, arrivals, strict=True)
        for _ in range(turn.generated)
    ]


def _chunks(case: Case) -> list[int]:
    """When each chunk that may carry text was sent. A chat's first one names the role only."""
    chunks, first = list(case.root.bodies), case.first_text or 0
    if OPERATIONS.get(case.root.operation) == "chat" and chunks and chunks[0] < first:
        del chunks[0]
    at = bisect_left(chunks, first)
    if at < len(chunks):
        chunks[at] = first  # the same send, noted twice: TTFT and the first token are to agree
    return chunks


def sent(processed: list[int], chunks: list[int], first: int = 0) -> list[int]:
    """When the outputs that the front end had ``processed`` at these times were sent.

    In a chunk each, if there are as many chunks, or one more with the usage. Otherwise some went out together, for
    which there is no mark: each with the first chunk after it was processed, and none before the ``first`` text.
    """
    if 0 <= len(chunks) - len(processed) <= 1 and all(c >= p for p, c in zip(processed, chunks, strict=False)):
        return chunks[: len(processed)]
    at = [bisect_left(chunks, max(time, first)) for time in processed]
    last = chunks[-1] if chunks else 0
    return [
        chunks[index] if index < len(chunks) else max(time, last) for index, time in zip(at, processed, strict=True)
    ]


def lag_growth_ms(lags: list[int]) -> float | None:
    """How much further behind the engine the stream was at its end than at its start; ``lags`` in ns, by token."""
    if len(lags) < 4:
        return None
    edge = max(len(lags) // 8, 1)
    return (fmean(lags[-edge:]) - fmean(lags[:edge])) / 1e6
