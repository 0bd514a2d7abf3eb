"""Marks of one sequence → its twelve stage records. A stage is bounded by its own two marks, never stretched."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .. import marks
from ..model import StageRecord
from ..stages import BY_KEY
from .book import Book, Root, Sequence, Span
from .life import Turn, first_token, prefill, turns
from .periods import LABELS, Periods


@dataclass
class Case:
    """Everything a stage may be computed from."""

    book: Book
    periods: Periods
    root: Root
    sequence: Sequence | None
    prompt: int = 0
    turns: list[Turn] = field(default_factory=list)
    chunks: list[Turn] = field(default_factory=list)
    first: Turn | None = None
    #: End of stage 10, once known: TTFT ends and decoding starts here.
    first_text: int | None = None
    ttft_kind: str | None = None
    #: End of stage 11.
    decoded: int | None = None

    @classmethod
    def of(cls, book: Book, periods: Periods, root: Root, sequence: Sequence | None) -> Case:
        """Gather what is known of ``sequence``."""
        case = cls(book, periods, root, sequence)
        if sequence is not None:
            case.prompt = sequence.added.b if sequence.added else 0
            case.turns = turns(book, sequence, case.prompt)
            case.chunks = prefill(case.turns, case.prompt)
            case.first = first_token(case.turns)
        return case

    def setting(self, name: str) -> int | None:
        """An engine setting as a number."""
        value = self.book.settings.get(name)
        return int(value) if value and value.lstrip("-").isdigit() else None


def stages(case: Case) -> list[StageRecord]:
    """All twelve, in order."""
    builders = (
        _http, _template, _tokenize, _admission, _allocate, _embedding,
        _prefill, _lm_head, _sample, _detokenize, _decode, _teardown,
    )  # fmt: skip
    return [build(case) for build in builders]


def _record(case: Case, key: str, start: int | None, end: int | None, **facts: Any) -> StageRecord:
    """A measured stage, or what it is when one of its marks is missing."""
    if start is None or end is None:
        return StageRecord(BY_KEY[key].number, key, _missing(case, key, start), attributes=facts)
    return _measured(case, key, start, end - start, **facts)


def _measured(case: Case, key: str, start: int, duration: int, **facts: Any) -> StageRecord:
    at = (start - case.root.started) / 1e6
    return StageRecord(BY_KEY[key].number, key, "measured", "host_clock", at, max(duration, 0) / 1e6, facts)


def _other(key: str, state: str, **facts: Any) -> StageRecord:
    return StageRecord(BY_KEY[key].number, key, state, attributes=facts)


def _missing(case: Case, key: str, start: int | None) -> str:
    """Why a stage has no times: it never came to it, or nobody could see it."""
    return "not_observable" if start is None and _reached_after(case, BY_KEY[key].number) else "not_reached"


def _reached_after(case: Case, number: int) -> bool:
    """Whether something that belongs to a later stage was seen."""
    root, sequence = case.root, case.sequence
    later = [
        (2, root.handler), (3, root.tokenize), (4, sequence and sequence.added), (5, sequence and sequence.blocks),
        (7, case.chunks and case.chunks[0].step.forward_ns), (10, case.first), (12, sequence and sequence.free),
    ]  # fmt: skip
    return any(seen and at > number for at, seen in later)


def _http(case: Case) -> StageRecord:
    root = case.root
    if root.offline:
        return _other("http_receive", "not_applicable")
    if root.handler is None and not root.sequences and root.status is not None:
        # Refused while the body was read or validated: the stage ends with the answer.
        return _record(case, "http_receive", root.started, root.status.t, route=root.texts.get(marks.ROUTE))
    mark = root.handler
    facts: dict[str, Any] = {"route": root.texts.get(marks.ROUTE)}
    if mark is not None:
        limit = mark.d if mark.d >= 0 else None
        facts = {"bytes": mark.a, **facts, "stream": bool(mark.b), "n": mark.c, "max_tokens": limit}
    return _record(case, "http_receive", root.started if mark else None, mark.t if mark else None, **facts)


def _template(case: Case) -> StageRecord:
    root = case.root
    if root.operation == 2 or (root.render is None and root.offline):
        return _other("chat_template", "not_applicable")
    if root.render is None:
        return _record(case, "chat_template", None, None)
    end = root.tokenize
    facts = {"messages": root.render.a, "characters": end.a if end else None}
    return _record(case, "chat_template", root.render.t, end.t if end else None, **facts)


def _tokenize(case: Case) -> StageRecord:
    root = case.root
    start, end = root.tokenize, root.tokenized
    if start is not None and start.a == 0 and end is not None:
        return _other("tokenize", "not_applicable", prompt_tokens=end.a)
    wait = (root.tokenize_run - start.t) / 1e6 if start and root.tokenize_run else None
    facts = {"prompt_tokens": end.a if end else None, "pool_wait_ms": wait}
    return _record(case, "tokenize", start.t if start else None, end.t if end else None, **facts)


def _admission(case: Case) -> StageRecord:
    s = case.sequence
    if s is None or s.added is None:
        return _record(case, "admission", None, None)
    end = s.lookups[-1] if s.lookups and s.blocks is not None else None
    facts: dict[str, Any] = {"hand_off_ms": None, "wait_ms": None, "reason": None, "queue_depth": None}
    if s.enqueued is not None:
        facts["hand_off_ms"] = (s.enqueued.t - s.added.t) / 1e6
        facts["queue_depth"] = s.enqueued.a
        if end is not None:
            facts["wait_ms"] = (end - s.enqueued.t) / 1e6
            facts["reason"] = _reason(case, s, s.enqueued.t, end)
    return _record(case, "admission", s.added.t, end, **facts, requeues=len(s.preempted))


def _reason(case: Case, sequence: Sequence, start: int, end: int) -> str:
    """What a waiting request waited for, from the steps that were composed without it."""
    if len(sequence.lookups) > 1:
        return "no_blocks"
    slots, budget = case.setting("max_num_seqs"), case.setting("max_num_batched_tokens")
    passed = [s for s in case.book.steps.values() if start < s.schedule_ns[0] and s.schedule_ns[1] < end]
    if not passed:
        return "step_in_progress"
    if slots and any(step.running >= slots for step in passed):
        return "no_slot"
    return "token_budget" if budget and any(step.tokens >= budget for step in passed) else "other"


def _allocate(case: Case) -> StageRecord:
    s = case.sequence
    if s is None or not s.lookups or s.blocks is None:
        return _record(case, "kv_allocate", None, None)
    held = 0
    for turn in case.chunks:
        held = turn.blocks if turn.computed == case.chunks[0].computed else held + turn.blocks
    size = case.setting("kv_block_bytes")
    facts = {
        "blocks": held or None, "block_size": case.setting("block_size"),
        "cached_tokens": case.chunks[0].computed if case.chunks else None, "bytes": held * size if size else None,
    }  # fmt: skip
    return _record(case, "kv_allocate", s.lookups[-1], s.blocks, **facts)


def _forwards(case: Case) -> list[Span] | None:
    """The forwards of the prompt, None if one of them was not timed where it ran."""
    spans = [turn.step.forward_ns for turn in case.chunks]
    if not spans or case.first is None or any(turn.step.device_async for turn in case.chunks):
        return None
    return [span for span in spans if span] if all(spans) else None


def _embedding(case: Case) -> StageRecord:
    if case.book.settings.get("embedding") == "fused":
        return _other("embedding", "fused")
    spans = [turn.step.embedding_ns for turn in case.chunks]
    if _forwards(case) is None or not all(spans):
        return _record(case, "embedding", None, None)
    whole = [span for span in spans if span]
    rows = sum(turn.tokens for turn in case.chunks)
    return _measured(case, "embedding", whole[0][0], sum(b - a for a, b in whole), rows=rows)


def _prefill(case: Case) -> StageRecord:
    forwards = _forwards(case)
    if forwards is None:
        return _record(case, "prefill", None, None)
    embedding = sum(b - a for t in case.chunks if t.step.embedding_ns for a, b in [t.step.embedding_ns])
    computing = sum(b - a for a, b in forwards)
    tokens = sum(turn.tokens for turn in case.chunks)
    share = sum((b - a) * t.tokens / max(t.step.tokens, 1) for t, (a, b) in zip(case.chunks, forwards, strict=True))
    block_bytes, block = case.setting("kv_block_bytes"), case.setting("block_size")
    facts = {
        "tokens": tokens, "chunks": len(case.chunks), "batch": max(turn.step.batch_size for turn in case.chunks),
        "gaps_ms": (forwards[-1][1] - forwards[0][0] - computing) / 1e6, "cost_share_ms": share / 1e6,
        "cache_bytes_written": tokens * block_bytes // block if block_bytes and block else None,
    }  # fmt: skip
    return _measured(case, "prefill", forwards[0][0], computing - embedding, **facts)


def _scope(case: Case, key: str, span: Span | None, **facts: Any) -> StageRecord:
    if case.first is None or span is None or case.first.step.device_async:
        return _record(case, key, None, None)
    return _measured(case, key, span[0], span[1] - span[0], **facts)


def _lm_head(case: Case) -> StageRecord:
    span = case.first.step.lm_head_ns if case.first else None
    return _scope(case, "lm_head", span, vocabulary=case.setting("vocabulary"), norm="fused")


def _sample(case: Case) -> StageRecord:
    mark = case.sequence.sampling if case.sequence else None
    facts: dict[str, Any] = {}
    if mark is not None:
        facts = {"temperature": mark.a / 1e6, "top_p": mark.b / 1e6, "top_k": mark.c, "grammar": bool(mark.d)}
    return _scope(case, "sample", case.first.step.sample_ns if case.first else None, **facts)


def _detokenize(case: Case) -> StageRecord:
    root, first = case.root, case.first
    if first is None or first.step.update_ns is None:
        return _record(case, "detokenize", None, None)
    start = first.step.update_ns[0]
    batch = case.book.outputs[root.pid].within(first.step.update_ns) if root.pid in case.book.outputs else None
    streams = root.handler is not None and bool(root.handler.b) and root.handler.c == 1
    end = root.first_text if streams else batch and batch[1]
    case.ttft_kind = "streamed" if streams else "internal"
    facts: dict[str, Any] = {"hand_back_ms": None, "detokenize_ms": None, "emit_ms": None}
    if batch:
        facts["hand_back_ms"] = (batch[0] - start) / 1e6
        facts["detokenize_ms"] = (batch[1] - batch[0]) / 1e6
        if streams and end is not None:
            facts["emit_ms"] = (end - batch[1]) / 1e6
    case.first_text = end
    if end is None:
        case.ttft_kind = None
    return _record(case, "detokenize", start, end, **facts)


def _decode(case: Case) -> StageRecord:
    s, start = case.sequence, case.first_text
    generated = sum(turn.generated for turn in case.turns)
    ends = [t for t in (s.stopped, s.free.t if s.free else None) if t is not None] if s else []
    end = min(ends) if ends else None
    if start is not None and end is not None:
        end = max(start, end)
        case.decoded = end
        if generated <= 1:
            return _other("decode", "not_applicable", tokens=0)
    if start is None or end is None or s is None:
        return _record(case, "decode", start, None)
    after = [turn for turn in case.turns if case.first and turn.step.step > case.first.step.step]
    facts = {
        "tokens": generated - 1, "steps": len(after), "split_ms": split(case, after, (start, end)),
        "batch": round(sum(t.step.batch_size for t in after) / len(after), 2) if after else None,
    }  # fmt: skip
    return _record(case, "decode", start, end, **facts)


def split(case: Case, after: list[Turn], window: Span) -> dict[str, float]:
    """The decode stage by what the engine did meanwhile, in ms; the parts add up to the window."""
    total = dict.fromkeys((*LABELS, "stalled", "preempted", "other"), 0.0)
    mine = {turn.step.step for turn in after}
    redone = {turn.step.step for turn in after if not turn.generated}
    for number in range(min(mine), max(mine) + 1) if mine else ():
        step = case.book.steps.get(number)
        parts = case.periods.split(step, window) if step else {}
        if number in mine and number not in redone:
            for label, spent in parts.items():
                total[label] += spent
        else:  # others ran while it was evicted, or passed over
            total["preempted" if case.sequence and case.sequence.preempted else "stalled"] += sum(parts.values())
    total["other"] += window[1] - window[0] - sum(total.values())
    return {label: spent / 1e6 for label, spent in total.items()}


def _teardown(case: Case) -> StageRecord:
    root, s = case.root, case.sequence
    start = case.decoded if case.decoded is not None else case.first_text
    end = finished(root)
    facts: dict[str, Any] = {}
    if s is not None and s.free is not None:
        facts = {"blocks_held": s.free.c & 0xFFFFFFFF, "blocks_freed": s.free.d, "blocks_kept": s.free.c >> 32}
    return _record(case, "teardown", start, end and start and max(end, start), **facts)


def finished(root: Root) -> int | None:
    """When the client had everything: the last send, or the return of an offline call."""
    if root.end is None:
        return None
    return root.sent[-1] if root.sent else root.end.t
