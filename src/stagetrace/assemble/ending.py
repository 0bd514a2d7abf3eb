"""How a request ended, and what that makes of the stages that have no times."""

from __future__ import annotations

from collections.abc import Callable

from .. import marks
from ..model import StageRecord
from ..stages import BY_KEY
from .case import Case

Alive = Callable[[int], bool]
_TOLERANCE_MS = 1e-6


def status_of(case: Case, alive: Alive) -> tuple[str, str | None]:
    """(status, finish reason)."""
    root, sequence = case.root, case.sequence
    # The front end has the last word: it may find a stop string in the token that the engine ends with anyway.
    told = (sequence.finished if sequence else None) or case.free
    reason = marks.FINISH.get(told.a) if told and told.a else None
    if sequence and sequence.stopped:
        reason = "stop"
    lost = _engine_lost(case, alive)
    if root.disconnect is not None and not lost:
        return "aborted", reason if case.completed is not None else "abort"
    if lost or case.failed or reason == "error":
        return "error", reason
    given_up = root.direct and sequence is not None and sequence.aborted is not None and case.completed is None
    if reason == "abort" or given_up:
        return "aborted", "abort"
    if root.end is not None:
        # That its end went unseen says nothing against a call whose every token was.
        well = root.end.b != marks.END_UNSEEN or case.completed is not None
        return "ok" if well else "error", reason
    return "error" if case.dead else "in_flight", reason


def _engine_lost(case: Case, alive: Alive) -> bool:
    """Whether the engine died with the request in it."""
    sequence, root = case.sequence, case.root
    if sequence is None or sequence.engine_pid is None or sequence.free or sequence.stopped:
        return False
    # A whole response that says 200 has all its tokens; a stream says so before it knows.
    answered = root.end is not None and root.status is not None and root.handler is not None and not root.handler.b
    return not alive(sequence.engine_pid) and (case.failed or not answered)


def error_of(case: Case, status: str, reason: str | None, alive: Alive) -> str | None:
    """Why a call was not answered in full; None if it was, or still runs.

    The class of the exception that left the application, else the HTTP status it answered with (400 and above), else
    ``process_ended`` (the call's own process, before the call was over), ``engine_died``, ``engine_error`` (the engine
    gave up on this request alone), the HTTP status that a stream came to name, or ``_OTHER``; ``aborted`` whenever it
    was the caller who gave up.
    """
    if status != "error":
        return "aborted" if status == "aborted" else None
    root = case.root
    if marks.ERROR in root.texts:
        return root.texts[marks.ERROR]
    if root.status is not None and root.status.a >= 400:
        return str(root.status.a)
    if root.end is None and not alive(root.pid):
        return "process_ended"
    if _engine_lost(case, alive):
        return "engine_died"
    if root.failure is not None and reason != "error":
        return str(root.failure.a)
    return "engine_error" if reason == "error" else "_OTHER"


def settle(case: Case, rows: list[StageRecord], status: str) -> str | None:
    """Say of every stage without times what it is; return the stage the request is, or was, in.

    None when it is ok, and where that cannot be known.
    """
    _refuse(case, rows)
    blind = status == "ok" or case.root.blind
    passed = 12 if blind else max(_passed(case), *(row.number for row in rows if row.state == "measured"), 0)
    for row in rows:
        if row.state == "not_reached" and row.number <= passed:
            row.state = "not_observable"
    active = None if blind else _active(case, rows)
    if active is not None:
        if status != "in_flight" and _interrupt(case, active) and active.key == "prefill":
            # No mark says how much of it was the embedding.
            rows[5].state = "not_observable" if rows[5].state == "not_reached" else rows[5].state
        for row in rows[active.number :]:
            _clear(row, "not_reached")
    for row in rows:
        if row.state == "measured":
            row.attributes = {**row.attributes, **{f: row.attributes.get(f) for f in BY_KEY[row.key].facts}}
    return active.key if active else None


def extent_ms(prefill: StageRecord, rows: list[StageRecord]) -> float:
    """From the start of the first chunk to the end of the last: with the embedding, and with the gaps in between."""
    inside = next((row.duration_ms or 0.0 for row in rows if row.key == "embedding"), 0.0)
    return (prefill.duration_ms or 0.0) + inside + (prefill.attributes.get("gaps_ms") or 0.0)


def _refuse(case: Case, rows: list[StageRecord]) -> None:
    """Lost marks can make times contradict each other; such a time is no measurement."""
    if case.first_text is not None and case.end is not None and case.first_text > case.end:
        case.first_text = case.ttft_kind = None
    limit = _after(case, case.end)
    reached = -_TOLERANCE_MS
    for row in rows:
        if row.key == "embedding" or row.start_ms is None or row.duration_ms is None:
            continue
        end = row.start_ms + (extent_ms(row, rows) if row.key == "prefill" else row.duration_ms)
        if row.start_ms < reached or end > limit or (row.number <= 10 and end > _after(case, case.first_text)):
            for each in rows[5:7] if row.key == "prefill" else (row,):
                _clear(each, "not_observable" if each.state == "measured" else each.state)
        else:
            reached = end - _TOLERANCE_MS


def _after(case: Case, time: int | None) -> float:
    return float("inf") if time is None else (time - case.root.started) / 1e6 + _TOLERANCE_MS


def _passed(case: Case) -> int:
    """The last stage that is over for certain, whether or not it was seen."""
    root, sequence = case.root, case.sequence
    seen = (
        (11, case.completed), (10, case.first_text or _beyond_first_text(case)),
        (9, any(turn.generated for turn in case.turns)),
        (5, case.turns), (3, sequence), (2, root.tokenize), (1, root.handler or root.render),
    )  # fmt: skip
    return next((number for number, sign in seen if sign), 0)


def _beyond_first_text(case: Case) -> bool:
    """Whether a text that cannot be told must have been there: the first token has long been followed by others."""
    return not case.streams and sum(turn.generated for turn in case.turns) > 1


def _active(case: Case, rows: list[StageRecord]) -> StageRecord:
    """The stage in progress; between two stages the next one, or the last one of a call that the engine never saw."""
    # The embedding is inside the prefill, which it would otherwise always hide.
    waiting = next((row for row in rows if row.state == "not_reached" and row.key != "embedding"), rows[-1])
    if case.root.sequences or waiting.key in case.began:
        return waiting
    return next((row for row in reversed(rows[: waiting.number]) if row.state == "measured"), waiting)


def _clear(row: StageRecord, state: str) -> None:
    row.state, row.source, row.start_ms, row.duration_ms = state, None, None, None


def _interrupt(case: Case, active: StageRecord) -> bool:
    """The stage a request ended in lasted until then; False if it is not known since or until when."""
    start, end = case.began.get(active.key), case.end
    if start is None or end is None or start > end or active.state != "not_reached":
        return False
    if case.dropped is not None and start <= case.dropped < end and active.key != "teardown":
        end = case.dropped
    active.state, active.source = "measured", "host_clock"
    active.start_ms, active.duration_ms = (start - case.root.started) / 1e6, (end - start) / 1e6
    active.attributes["interrupted"] = True
    return True
