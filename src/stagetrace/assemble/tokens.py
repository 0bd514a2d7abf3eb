"""When each token reached its client: the engine's updates matched with what was sent."""

from __future__ import annotations

from bisect import bisect_left
from statistics import fmean

from .stopwatch import Case


def token_times(case: Case) -> list[int]:
    """One time per generated token, monotonic ns: its send where it was streamed, else the engine's update."""
    updates = [
        turn.step.update_ns[1] for turn in case.turns if turn.step.update_ns for _ in range(turn.generated)
    ]  # fmt: skip
    if not updates or case.ttft_kind != "streamed" or case.root.first_text is None:
        return updates
    return _one_each(updates, case.root.sent, case.root.first_text) or _first_after(updates, case.root.sent)


def _one_each(updates: list[int], sent: list[int], first_text: int) -> list[int] | None:
    """Each token in a chunk of its own, counted from the chunk that carried the first text; None if not so."""
    anchor_chunk = bisect_left(sent, first_text)
    anchor_token = max(bisect_left(updates, first_text) - 1, 0)
    low = anchor_chunk - anchor_token
    if low < 0 or low + len(updates) > len(sent):
        return None
    times = sent[low : low + len(updates)]
    return times if all(s >= u for s, u in zip(times, updates, strict=True)) else None


def _first_after(updates: list[int], sent: list[int]) -> list[int]:
    """Tokens merged into chunks: each goes with the first chunk sent after its update."""
    times = []
    for update in updates:
        at = bisect_left(sent, update)
        times.append(sent[at] if at < len(sent) else update)
    return times


def itl_ms(times: list[int]) -> list[float]:
    """Inter-token latencies in ms. Tokens of one speculative step share its time."""
    gaps: list[float] = []
    pending = 0
    for before, after in zip(times, times[1:], strict=False):
        pending += 1
        if after > before:
            gaps += [(after - before) / 1e6 / pending] * pending
            pending = 0
    return gaps + [0.0] * pending


def lag_growth_ms(updates: list[int], times: list[int]) -> float | None:
    """How much further behind the engine the stream was at its end than at its start."""
    lags = [t - u for u, t in zip(updates, times, strict=True)]
    if len(lags) < 4:
        return None
    edge = max(len(lags) // 8, 1)
    return (fmean(lags[-edge:]) - fmean(lags[:edge])) / 1e6
