"""The steps that a client waited for longest while it was being answered, and what they were spent on."""

from __future__ import annotations

import heapq
from itertools import pairwise
from typing import Any

from .case import Case
from .decode import split
from .tokens import Delivery

#: So many are kept.
WORST = 5


def worst_steps(case: Case, tokens: list[Delivery]) -> list[dict[str, Any]]:
    """Of the steps after the first token's, those with the longest wait from the token before, in order.

    ``token`` is the index of the first token of the step, ``at_ms`` its arrival after the request's start, ``gap_ms``
    the wait for it, and ``cause`` the part of ``split_ms`` that most of it was, or ``emit``, the way to the client.
    """
    gaps = [
        (token.arrived - before.arrived, index)
        for index, (before, token) in enumerate(pairwise(tokens), 1)
        if token.turn is not before.turn and token.arrived > before.arrived
    ]
    worst = sorted((index, gap) for gap, index in heapq.nlargest(WORST, gaps))
    return [_described(case, tokens, index, gap) for index, gap in worst]


def _described(case: Case, tokens: list[Delivery], index: int, gap: int) -> dict[str, Any]:
    before, token = tokens[index - 1], tokens[index]
    spent = split(case, (before.booked, token.booked), before.turn.step.step + 1)
    emit = token.lag - before.lag
    cause = max(spent.parts, key=lambda part: spent.parts[part])
    step = token.turn.step
    found = {
        "token": index, "at_ms": (token.arrived - case.root.started) / 1e6, "gap_ms": gap / 1e6,
        "step": str(step.step), "batch": step.batch_size, "prefill_tokens": step.prefill_tokens,
        "cause": "emit" if emit > spent.parts[cause] else cause,
    }  # fmt: skip
    culprit = next(iter(spent.culprits(case.book)), None)
    return found | ({"stalled_by": culprit["request_id"]} if culprit and found["cause"] == "stalled" else {})
