"""What a request waited for in the engine's queue, from the steps that were composed without it."""

from __future__ import annotations

from ..model import StepRecord
from .book import Sequence
from .case import Case


def reason(case: Case, sequence: Sequence, admitted: int) -> str | None:
    """Of what kept it waiting until it was ``admitted``, what did so for longest; None where that was not seen.

    ``no_blocks`` (for it, or for whom it stood behind), ``no_slot``, ``token_budget``, ``grammar`` (being compiled),
    ``step_in_progress`` (the engine was busy when it came, and took it up next), ``other``, or ``none``.
    """
    queued = sequence.enqueued
    if queued is None or not sequence.joins:
        return None
    first = min(sequence.joins)[0]
    passed: list[StepRecord] = []
    while (step := case.book.steps.get(first - 1 - len(passed))) is not None and step.schedule_ns[0] > queued.t:
        passed.append(step)
    if not passed:
        if queued.c:
            return "grammar"
        # An engine takes new requests in between two steps: the one that ran when it came is waited for.
        came = sequence.added.t if sequence.added else queued.t
        running = step is not None and (step.update_ns is None or step.update_ns[1] > came)
        return "step_in_progress" if running else "none"
    spent: dict[str, int] = {}
    until = admitted
    for step in passed:  # the latest first: each holds until the next one is composed
        cause = _denied(case, sequence, step)
        spent[cause] = spent.get(cause, 0) + until - step.schedule_ns[0]
        until = step.schedule_ns[0]
    return max(spent, key=lambda cause: spent[cause])


def _denied(case: Case, sequence: Sequence, step: StepRecord) -> str:
    """Why a step was composed without a request that was waiting for it."""
    slots, budget = case.setting("max_num_seqs"), case.setting("max_num_batched_tokens")
    if step.step in case.book.denied or step.preempted:
        return "no_blocks"
    if slots and step.running >= slots:
        return "no_slot"
    if budget and step.tokens >= budget:
        return "token_budget"
    return "grammar" if sequence.enqueued is not None and sequence.enqueued.c else "other"
