"""Marks of one sequence → its twelve stage records. A stage is bounded by its own two marks, never stretched."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

from .. import marks
from ..model import StageRecord
from ..stages import BY_KEY
from .book import Span
from .case import Case
from .decode import split
from .fit import Fitted, fitted, inside
from .life import Turn
from .waiting import reason


def stages(case: Case) -> list[StageRecord]:
    """All twelve, in order."""
    builders = (
        _http, _template, _tokenize, _admission, _allocate, _embedding,
        _prefill, _lm_head, _sample, _detokenize, _decode, _teardown,
    )  # fmt: skip
    return [build(case) for build in builders]


def _record(case: Case, key: str, start: int | None, end: int | None, **facts: Any) -> StageRecord:
    """A measured stage. Where a mark is missing it reads ``not_reached`` until :mod:`.ending` knows better."""
    cut = case.cut
    if start is None or (cut is not None and start > cut):
        return _other(key, "not_reached", **facts)
    if end is None or (cut is not None and end > cut):
        case.began[key] = start
        return _other(key, "not_reached", **facts)
    return _measured(case, key, start, end - start, **facts)


def _measured(case: Case, key: str, start: int, duration: int, **facts: Any) -> StageRecord:
    if duration < 0:
        return _other(key, "not_observable", **facts)
    at = (start - case.root.started) / 1e6
    return StageRecord(BY_KEY[key].number, key, "measured", "host_clock", at, duration / 1e6, facts)


def _other(key: str, state: str, **facts: Any) -> StageRecord:
    return StageRecord(BY_KEY[key].number, key, state, attributes=facts)


def _http(case: Case) -> StageRecord:
    root = case.root
    if root.offline:
        return _other("http_receive", "not_applicable")
    mark = root.handler
    facts: dict[str, Any] = {"route": root.texts.get(marks.ROUTE)}
    if mark is not None:
        limit = mark.d if mark.d >= 0 else None
        facts = {"bytes": mark.a, **facts, "stream": bool(mark.b), "n": mark.c, "max_tokens": limit}
    return _record(case, "http_receive", root.started, mark.t if mark else None, **facts)


def _template(case: Case) -> StageRecord:
    root = case.root
    if root.render is None:
        # A chat always has one, prompts to generate from never, others do if they come as messages.
        none = root.offline or root.operation in (2, 3) or (root.operation != 1 and bool(root.tokenize))
        return _other("chat_template", "not_applicable") if none else _record(case, "chat_template", None, None)
    text = _tokenization(case)
    facts = {"messages": root.render.a, "characters": (text.characters or None) if text else None}
    return _record(case, "chat_template", root.render.t, text.start if text else None, **facts)


def _tokenize(case: Case) -> StageRecord:
    text = _tokenization(case)
    if text is None:
        return _record(case, "tokenize", None, None)
    if not text.characters and text.end is not None:  # ids came with the request, or out of the template at once
        state = "fused" if case.root.render is not None else "not_applicable"
        return _other("tokenize", state, prompt_tokens=text.tokens)
    run = case.root.tokenize_run
    wait = (run - text.start) / 1e6 if run is not None else None
    return _record(case, "tokenize", text.start, text.end, prompt_tokens=text.tokens, pool_wait_ms=wait)


class _Text(NamedTuple):
    """What was tokenised before the engine got anything: from the first text taken up to the last one done."""

    start: int
    end: int | None
    characters: int
    tokens: int | None


def _tokenization(case: Case) -> _Text | None:
    root = case.root
    until = min((s.added.t for s in root.sequences if s.added is not None), default=None)
    begun, done = ([m for m in found if until is None or m.t <= until] for found in (root.tokenize, root.tokenized))
    if not begun:
        return None
    whole = len(done) >= len(begun)
    tokens = sum(m.a for m in done) if whole and all(m.a >= 0 for m in done) else None
    end = max(m.t for m in done) if whole else None
    return _Text(min(m.t for m in begun), end, sum(m.a for m in begun), tokens)


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
            facts["reason"] = reason(case, s, end)
    return _record(case, "admission", s.added.t, end, **facts, requeues=len(s.preempted))


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


def _forwards(case: Case) -> list[Fitted] | None:
    """The forwards of the prompt, None if one of them was not timed where it ran."""
    if not case.chunks or case.first is None:
        return None
    found: list[Fitted] = []
    for turn in case.chunks:
        if turn.step.forward_ns is None:
            return None
        found.append(fitted(turn.step, turn.step.forward_ns, found[-1].span[1] if found else 0))
    return found


def _embeddings(case: Case, known: list[Fitted] | None) -> list[Span]:
    """The embedding of each chunk, nothing if one of them is unknown or not a part of its forward."""
    if known is None or case.book.settings.get("embedding") == "fused":
        return []
    found = []
    for turn, forward in zip(case.chunks, known, strict=True):
        span, whole = turn.step.embedding_ns, turn.step.forward_ns
        if not span or not whole or not whole[0] <= span[0] <= span[1] <= whole[1]:
            return []
        found.append(inside(span, forward.span))
    return found


def _embedding(case: Case) -> StageRecord:
    if case.book.settings.get("embedding") == "fused":
        return _other("embedding", "fused")
    spans = _embeddings(case, _forwards(case))
    if not spans:
        return _record(case, "embedding", None, None)
    rows = sum(turn.tokens for turn in case.chunks)
    made = _measured(case, "embedding", spans[0][0], sum(b - a for a, b in spans), rows=rows)
    return _timed_by(made, case.chunks)


def _prefill(case: Case) -> StageRecord:
    forwards = _forwards(case)
    if forwards is None:
        begun = case.chunks[0].step if case.chunks else None
        if case.first is None and begun is not None and begun.forward_ns:
            return _record(case, "prefill", begun.forward_ns[0], None)
        return _record(case, "prefill", None, None)
    known = [forward.span for forward in forwards]
    embedding = sum(b - a for a, b in _embeddings(case, forwards))
    computing = sum(b - a for a, b in known)
    tokens = sum(turn.tokens for turn in case.chunks)
    share = sum((b - a) * t.tokens / max(t.step.tokens, 1) for t, (a, b) in zip(case.chunks, known, strict=True))
    block_bytes, block = case.setting("kv_block_bytes"), case.setting("block_size")
    facts = {
        "tokens": tokens, "chunks": len(case.chunks), "batch": max(turn.step.batch_size for turn in case.chunks),
        "gaps_ms": (known[-1][1] - known[0][0] - computing) / 1e6, "cost_share_ms": share / 1e6,
        "cache_bytes_written": tokens * block_bytes // block if block_bytes and block else None,
    }  # fmt: skip
    out = _evicted(case, known)
    if out:
        facts["preempted_ms"] = out / 1e6
    made = _measured(case, "prefill", known[0][0], computing - embedding, **facts)
    return _timed_by(made, case.chunks, sum(forward.moved for forward in forwards))


def _timed_by(row: StageRecord, turns: list[Turn], moved: int = 0) -> StageRecord:
    """Say by which clock, the device's where it has timed all of it, and by how many ns it was fitted to the host's."""
    if row.state == "measured" and all(turn.step.device_timed for turn in turns):
        row.source = "cuda_event"
        if moved:
            row.attributes["clamped_ms"] = moved / 1e6
    return row


def _evicted(case: Case, known: list[Span]) -> int:
    """Of the gaps between the chunks: from an eviction to the next chunk, ns."""
    out = 0
    composed = [turn.step.schedule_ns[1] for turn in case.chunks]
    for (before, after), (last, then) in zip(pairwise(known), pairwise(composed), strict=True):
        # Under asynchronous scheduling, that comes while the last chunk is still being computed.
        times = [t for t in (case.sequence.preempted if case.sequence else ()) if last <= t < then]
        out += after[0] - max(times[-1], before[1]) if times else 0
    return out


def _scope(case: Case, key: str, **facts: Any) -> StageRecord:
    """Stage 8 or 9, of the step that drew the first token."""
    if case.pools:
        return _other(key, "not_applicable")
    reached, found = 0, None
    step = case.first.step if case.first else None
    for name, span in (("", step.forward_ns), ("lm_head", step.lm_head_ns), ("sample", step.sample_ns)) if step else ():
        place = fitted(step, span, reached) if step and span else None
        reached = place.span[1] if place else reached
        found = place if name == key else found
    if found is None or case.first is None:
        return _record(case, key, None, None)
    start, end = found.span
    return _timed_by(_measured(case, key, start, end - start, **facts), [case.first], found.moved)


def _lm_head(case: Case) -> StageRecord:
    return _scope(case, "lm_head", vocabulary=case.setting("vocabulary"), norm="fused")


def _sample(case: Case) -> StageRecord:
    mark = case.sequence.sampling if case.sequence else None
    facts: dict[str, Any] = {}
    if mark is not None:
        facts = {"temperature": mark.a / 1e6, "top_p": mark.b / 1e6, "top_k": mark.c, "grammar": bool(mark.d)}
    return _scope(case, "sample", **facts)


def _detokenize(case: Case) -> StageRecord:
    if case.pools:
        return _other("detokenize", "not_applicable")
    first = case.first
    batch = case.processed(first.step) if first else None
    end = _emitted(case, batch)
    if first is None or first.step.update_ns is None:
        return _record(case, "detokenize", None, None)
    start = first.step.update_ns[0]
    facts: dict[str, Any] = {"hand_back_ms": None, "detokenize_ms": None, "emit_ms": None}
    if batch:
        facts["hand_back_ms"] = (batch[0] - start) / 1e6
        facts["detokenize_ms"] = (batch[1] - batch[0]) / 1e6
        if case.ttft_kind == "streamed" and end is not None:
            facts["emit_ms"] = (end - batch[1]) / 1e6
    return _record(case, "detokenize", start, end, **facts)


def _emitted(case: Case, batch: Span | None) -> int | None:
    """When TTFT ends: the first text is sent, or where that cannot be told, the first token is processed."""
    root = case.root
    if not root.watched:
        return None
    if case.streams and (root.first_text is not None or root.end is None or case.completed is None):
        case.first_text = root.first_text
        kind = "streamed"
    else:  # a stream may also complete without any text in it
        case.first_text = batch[1] if batch else None
        kind = "internal"
    case.ttft_kind = kind if case.first_text is not None else None
    return case.first_text


def _decode(case: Case) -> StageRecord:
    start, end = case.first_text, case.completed
    if end is not None:
        case.decoded = end if start is None else max(start, end)
    generated = case.generated if end is not None else None
    if case.pools or (generated is not None and generated <= 1):
        return _other("decode", "not_applicable", tokens=0)
    until = case.decoded or case.dropped
    facts = _spent(case, (start, until)) if start is not None and until is not None and start <= until else {}
    return _record(case, "decode", start, case.decoded, **facts)


def _spent(case: Case, window: Span) -> dict[str, Any]:
    """What the engine did in the time of stage 11, which may have been cut short."""
    after = [turn.step for turn in case.turns if case.first and turn.step.step > case.first.step.step]
    after = [step for step in after if step.update_ns and step.update_ns[0] <= window[1]]
    parts = split(case, window)
    return {
        "tokens": case.generated - 1 if case.generated else None, "steps": len(after) or None,
        "batch": round(sum(step.batch_size for step in after) / len(after), 2) if after else None,
        "split_ms": parts.ms(), "split_source": parts.source,
        "overlapped_ms": parts.overlapped / 1e6 if after else None,
        "stalled_by": parts.culprits(case.book),
    }  # fmt: skip


def _teardown(case: Case) -> StageRecord:
    s = case.sequence
    facts: dict[str, Any] = {}
    if s is not None and s.free is not None:
        facts = {"blocks_held": s.free.c & 0xFFFFFFFF, "blocks_freed": s.free.d, "blocks_kept": s.free.c >> 32}
    whole = case.root.disconnect is None and not case.failed
    return _record(case, "teardown", case.decoded, case.end if whole else None, **facts)
