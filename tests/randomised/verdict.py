"""What has to be true of the records of a request, given what was asked and what its client saw."""

from __future__ import annotations

from collections.abc import Iterator

from stagetrace.model import RequestRecord
from tests.engine.kinds import usage
from tests.engine.serving import ClientResult

from .mix import Ask

#: What a server has no time for on a busy machine: a client may have read what is not yet noted as sent.
SLACK_MS = 2000.0


def contradiction(ask: Ask, result: ClientResult, records: list[RequestRecord]) -> str:
    """What of the records is not as the client saw it, in a line; nothing if all is."""
    wrong = [what for what, holds in _claims(ask, result, records) if not holds]
    found = [(r.status, r.active_stage, r.finish_reason, r.output_tokens) for r in records]
    return f"not {', '.join(wrong)}: {ask} {result} {found}" if wrong else ""


def _claims(ask: Ask, result: ClientResult, records: list[RequestRecord]) -> Iterator[tuple[str, bool]]:
    statuses = {record.status for record in records}
    yield "one record of each sequence", [r.sequence for r in records] == list(range(len(records))) != []
    yield "one root", len({r.span_id for r in records}) == 1
    if not records:
        return
    if not ask.sequences:
        yield "an error", statuses == {"error"} and len(records) == 1
        yield "that the client was told", result.error is not None
        yield "before the engine", records[0].active_stage in ("http_receive", "tokenize")
        yield "with its status", records[0].http_status == result.status
    elif result.hung_up or result.status == 0:
        # It may have been too late to be given up, or too early to have become what it was to be.
        yield "given up", statuses in ({"aborted"}, {"ok"})
        yield "no more than it asked for", len(records) <= ask.sequences
        yield "and somewhere", all((r.active_stage is None) == (r.status == "ok") for r in records)
    else:
        yield from _answered(ask, result, records)


def _answered(ask: Ask, result: ClientResult, records: list[RequestRecord]) -> Iterator[tuple[str, bool]]:
    yield "answered", (result.status, result.error) == (200, None)
    yield "well", {record.status for record in records} == {"ok"}
    yield "in full", len(records) == ask.sequences
    yield "under its id", {r.request_id for r in records} == {result.response_id}
    yield "in time", all(0 < (r.e2e_ms or 0) <= result.e2e_ms + SLACK_MS for r in records)
    if result.finish_reasons:
        told = [result.finish_reasons.get(record.sequence) for record in records]
        yield "for its reasons", [record.finish_reason for record in records] == told
    prompts, outputs = usage(result)
    if prompts is not None:
        yield "from its prompts", sum(r.prompt_tokens or 0 for r in records) == prompts * (ask.body.get("n") or 1)
        yield "with its tokens", sum(r.output_tokens or 0 for r in records) == (outputs or 0)
