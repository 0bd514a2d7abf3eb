"""What the marks have said so far: roots, sequences and steps, keyed by their 64-bit numbers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from .. import marks
from ..marks import Mark, TextMark
from ..model import StepRecord

Span = tuple[int, int]
END_MARKER = len("data: [DONE]\n\n")


@dataclass
class Root:
    """One call of a client. Times are monotonic ns, None until the mark is there."""

    number: int
    pid: int
    started: int
    trace_id: str
    operation: int
    #: No HTTP call: an offline one, or the caller's own code at the engine's door (then ``direct``).
    offline: bool
    direct: bool
    #: Whether its beginning and its end are seen; else it is direct, too.
    watched: bool = True
    texts: dict[int, str] = field(default_factory=dict)
    handler: Mark | None = None
    render: Mark | None = None
    #: A call with several prompts may have each tokenised by itself, one that goes on by itself several times over.
    tokenize: list[Mark] = field(default_factory=list)
    tokenize_run: int | None = None
    tokenized: list[Mark] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    status: Mark | None = None
    #: What a stream said of itself when it was too late for a status.
    failure: Mark | None = None
    background: int | None = None
    first_text: int | None = None
    sent: list[int] = field(default_factory=list)
    #: Those of them that can carry text: not empty, and more than the end marker of a stream.
    bodies: list[int] = field(default_factory=list)
    disconnect: int | None = None
    end: Mark | None = None
    #: Time of its latest mark.
    heard: int = 0
    #: Collector's clock when nothing more was expected of it.
    settled: int | None = None

    @property
    def blind(self) -> bool:
        """Whether the engine may have had it without anybody's noticing."""
        return self.end is not None and self.end.b == marks.ENGINE_UNSEEN

    @property
    def end_unseen(self) -> bool:
        """Whether it is over, and nobody knows since when."""
        return self.end is not None and (self.end.b == marks.END_UNSEEN or not self.watched)


@dataclass
class Sequence:
    """One engine request. ``joins`` are (step, tokens, computed before, new blocks); ``leaves`` are steps."""

    number: int
    #: Time of the latest mark of its own; steps it merely goes on in write none.
    heard: int = 0
    root: int | None = None
    engine_pid: int | None = None
    added: Mark | None = None
    internal_id: str | None = None
    sampling: Mark | None = None
    arrived: int | None = None
    enqueued: Mark | None = None
    lookups: list[int] = field(default_factory=list)
    blocks: int | None = None
    joins: list[tuple[int, int, int, int]] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)
    tokens: dict[int, int] = field(default_factory=dict)
    preempted: list[int] = field(default_factory=list)
    free: Mark | None = None
    stopped: int | None = None
    #: What the front end took its end for.
    finished: Mark | None = None
    aborted: int | None = None
    #: How others name it once its root has been written out.
    name: Name | None = None


class Name(NamedTuple):
    """Whose sequence it is: the ids of its request and of that request's root span."""

    request_id: str
    trace_id: str
    span_id: str


class Outputs:
    """A front end's processed batches, findable by the time stamp the engine gave them."""

    def __init__(self) -> None:
        self._stamps: list[int] = []
        self._spans: list[Span] = []

    def add(self, mark: Mark) -> None:
        """Keep one batch; stamps arrive in order but for rare ties."""
        at = bisect_right(self._stamps, mark.c)
        self._stamps.insert(at, mark.c)
        self._spans.insert(at, (mark.a, mark.b))

    def within(self, span: Span) -> Span | None:
        """First entry and last exit of the batches the engine made during ``span`` (float stamps: ± 2 µs)."""
        low = bisect_left(self._stamps, span[0] - 2000)
        high = bisect_right(self._stamps, span[1] + 2000)
        return (self._spans[low][0], self._spans[high - 1][1]) if low < high else None

    def after(self, time: int) -> int | None:
        """Exit of the first batch the engine stamped at or after ``time``, less the update's own tail."""
        at = bisect_left(self._stamps, time)
        return self._spans[at][1] if at < len(self._stamps) else None

    def forget(self, before: int) -> None:
        """Drop what is older than ``before``."""
        at = bisect_left(self._stamps, before)
        del self._stamps[:at], self._spans[:at]


class Book:
    """Takes marks in, in any order between processes, and keeps them by what they are about."""

    def __init__(self) -> None:
        self.roots: dict[int, Root] = {}
        #: By number; several of one number when an id was used again.
        self.sequences: dict[int, list[Sequence]] = {}
        self.steps: dict[int, StepRecord] = {}
        #: The newest step of each engine.
        self.last_step: dict[int, int] = {}
        self.outputs: dict[int, Outputs] = {}
        self.settings: dict[str, str] = {}
        self.hooks: dict[int, dict[str, str]] = {}
        self._hooks_said: dict[tuple[int, str], int] = {}
        #: What workers say of the GPU they have, by process: see :data:`stagetrace.marks.GPU`.
        self.gpus: dict[int, str] = {}
        #: The processes that have worked on an engine's steps.
        self.workers: dict[int, set[int]] = {}
        self.fresh_steps: list[int] = []
        #: By step: who had prompt positions computed there, and how many.
        self.prefills: dict[int, list[tuple[Sequence, int]]] = {}
        #: Steps composed while somebody was found to have no room: the look-up was not followed by blocks.
        self.denied: set[int] = set()
        self._asked: dict[int, int] = {}
        #: Marks of roots and steps that are not known yet: another ring was read first.
        self._early: dict[int, list[Mark]] = {}
        self._evicted: dict[int, int] = {}
        self._take: dict[int, Callable[[Mark, int], None]] = {
            marks.ROOT: self._root,
            marks.ADD: self._add,
            marks.ENQUEUE: self._enqueue,
            marks.OUTPUTS: lambda m, pid: self.outputs.setdefault(pid, Outputs()).add(m),
            marks.STEP: self._step,
            marks.UPDATE: self._update,
            **dict.fromkeys(_ROOT_FIELDS, self._on_root),
            **dict.fromkeys((*_SEQUENCE_FIELDS, *_SEQUENCE_LISTS), self._on_sequence),
            **dict.fromkeys(_STEP_FIELDS, self._on_step),
        }

    def take(self, mark: Mark | TextMark, pid: int) -> None:
        """Note one mark written by process ``pid``."""
        if isinstance(mark, TextMark):
            self._text(mark, pid)
            return
        handler = self._take.get(mark.kind)
        if handler is not None:
            handler(mark, pid)

    def forget(self, root: Root, name: Name) -> None:
        """Drop a root that has been written out, and its sequences; steps may still refer to these, by ``name``."""
        self.roots.pop(root.number, None)
        for sequence in root.sequences:
            sequence.name = name
            self._drop(sequence)

    def forget_before(self, time: int) -> None:
        """Drop steps and batches that no live request can refer to any more, and marks nobody claimed."""
        for number in [n for n, s in self.steps.items() if s.schedule_ns[1] < time]:
            del self.steps[number]
            self.prefills.pop(number, None)
            self.denied.discard(number)
        for outputs in self.outputs.values():
            outputs.forget(time)
        for number in [n for n, ms in self._early.items() if ms[0].t < time]:
            del self._early[number]
        for sequence in [s for uses in self.sequences.values() for s in uses if s.root is None and s.heard < time]:
            self._drop(sequence)

    def _drop(self, sequence: Sequence) -> None:
        uses = [s for s in self.sequences.get(sequence.number, ()) if s is not sequence]
        if uses:
            self.sequences[sequence.number] = uses
        else:
            self.sequences.pop(sequence.number, None)

    def _new(self, number: int) -> Sequence:
        fresh = Sequence(number)
        self.sequences.setdefault(number, []).append(fresh)
        return fresh

    def _of_front_end(self, number: int) -> Sequence:
        """Whom a front-end mark is about: the last one it has handed over."""
        uses = self.sequences.get(number) or [self._new(number)]
        return max(uses, key=lambda s: s.added.t if s.added else -1) if len(uses) > 1 else uses[0]

    def _of_engine(self, number: int) -> Sequence:
        """Whom an engine mark is about: the last one it has put into its queue."""
        uses = self.sequences.get(number) or [self._new(number)]
        return max(uses, key=lambda s: s.enqueued.t if s.enqueued else -1) if len(uses) > 1 else uses[0]

    def _text(self, mark: TextMark, pid: int) -> None:
        if mark.field == marks.ENGINE:
            key, _, value = mark.text.partition("=")
            self.settings[key] = value
        elif mark.field == marks.HOOK:
            target, _, state = mark.text.partition(" ")
            if mark.t >= self._hooks_said.get((pid, target), 0):  # threads have rings of their own
                self._hooks_said[pid, target] = mark.t
                self.hooks.setdefault(pid, {})[target] = state
        elif mark.field == marks.GPU:
            self.gpus[pid] = mark.text
        elif mark.field == marks.INTERNAL_ID:
            self._of_front_end(mark.key).internal_id = mark.text
        elif mark.key in self.roots:
            self.roots[mark.key].texts[mark.field] = mark.text

    def _root(self, mark: Mark, pid: int) -> None:
        trace = f"{marks.unsigned(mark.a):016x}{marks.unsigned(mark.b):016x}"
        kind = mark.d
        root = Root(
            mark.key, pid, mark.t, trace, mark.c, heard=mark.t, watched=kind != marks.UNWATCHED,
            offline=kind in (marks.OFFLINE, marks.DIRECT), direct=kind in (marks.DIRECT, marks.UNWATCHED),
        )  # fmt: skip
        self.roots[mark.key] = root
        for early in self._early.pop(mark.key, ()):
            self._on_root(early, pid)

    def _on_root(self, mark: Mark, _pid: int) -> None:
        root = self.roots.get(mark.key)
        if root is None:  # a tokenizer thread's ring was read before the main thread's
            self._early.setdefault(mark.key, []).append(mark)
            return
        root.heard = mark.t
        name, value = _ROOT_FIELDS[mark.kind]
        if name == "sent":
            root.sent.append(mark.t)
            if mark.a > END_MARKER:
                root.bodies.append(mark.t)
        elif value is list:
            getattr(root, name).append(mark)
        elif name not in ("render", "tokenize_run") or getattr(root, name) is None:  # the first of these counts
            setattr(root, name, mark if value is Mark else mark.t)

    def _add(self, mark: Mark, _pid: int) -> None:
        number = marks.unsigned(mark.a)
        # The engine may have been read first; then its marks wait here for who they are about.
        early = (s for s in self.sequences.get(number, ()) if s.added is None)
        sequence = next((s for s in early if s.enqueued is None or s.enqueued.t >= mark.t), None) or self._new(number)
        sequence.added, sequence.heard = mark, mark.t
        root = self.roots.get(mark.key)
        if root is not None:
            sequence.root = root.number
            root.sequences.append(sequence)

    def _enqueue(self, mark: Mark, pid: int) -> None:
        # An id is used again only after its answer: whoever was handed over last before this is meant.
        uses = self.sequences.get(mark.key, ())
        handed = next((s for s in reversed(uses) if s.added and s.added.t <= mark.t), None)
        sequence = handed or next((s for s in uses if s.added is None), None)
        if sequence is None or sequence.enqueued is not None:
            sequence = self._new(mark.key)
        sequence.enqueued, sequence.engine_pid, sequence.heard = mark, pid, mark.t

    def _on_sequence(self, mark: Mark, pid: int) -> None:
        kind = mark.kind
        if kind in _ENGINE_KINDS:
            sequence = self._of_engine(mark.key)
            sequence.engine_pid = pid
        else:
            sequence = self._of_front_end(mark.key)
        sequence.heard = mark.t
        if kind == marks.JOIN:
            sequence.joins.append((mark.a, mark.b, mark.c, mark.d & 0xFFFFFFFF))
            if mark.d >> 32 and mark.a in self.steps:
                self.steps[mark.a].prefill_tokens += mark.b
                self.prefills.setdefault(mark.a, []).append((sequence, mark.b))
        elif kind == marks.LEAVE:
            sequence.leaves.append(mark.a)
        elif kind == marks.TOKENS:
            sequence.tokens[mark.a] = mark.b
        elif kind == marks.LOOKUP:
            self._asked[pid] = mark.t
            # Only those of the first admission bound stage 4; there are many when a request is stuck.
            if sequence.blocks is None and not sequence.joins:
                sequence.lookups.append(mark.t)
        elif kind == marks.BLOCKS:
            self._asked.pop(pid, None)
            if sequence.blocks is None and sequence.lookups and not sequence.joins:
                sequence.blocks = mark.t
        elif kind == marks.PREEMPT:
            sequence.preempted.append(mark.t)
            self._evicted[pid] = self._evicted.get(pid, 0) + 1
        else:
            name, value = _SEQUENCE_FIELDS[kind]
            setattr(sequence, name, mark if value is Mark else mark.t)

    def _step(self, mark: Mark, pid: int) -> None:
        step = StepRecord(
            step=mark.key,
            engine=mark.key >> 32,
            schedule_ns=(mark.a, mark.t),
            batch_size=mark.b & 0xFFFFFFFF,
            tokens=mark.b >> 32,
            prefill_tokens=0,
            running=mark.c & 0xFFFFFFFF,
            waiting=mark.c >> 32,
            kv_usage=mark.d / 1e6,
            preempted=self._evicted.pop(pid, 0),
        )
        self.steps[mark.key] = step
        if self._asked.pop(pid, -1) >= mark.a:
            self.denied.add(mark.key)
        self.last_step[step.engine] = mark.key
        for early in self._early.pop(mark.key, ()):
            self._on_step(early, pid)

    def _update(self, mark: Mark, _pid: int) -> None:
        step = self.steps.get(mark.key)
        if step is not None:
            step.update_ns = (mark.a, mark.t)
            self.fresh_steps.append(mark.key)

    def _on_step(self, mark: Mark, pid: int) -> None:
        if mark.kind == marks.EXECUTE:
            self.workers.setdefault(mark.key >> 32, set()).add(pid)
        step = self.steps.get(mark.key)
        if step is None:  # the worker's ring was read before the engine's
            self._early.setdefault(mark.key, []).append(mark)
            return
        if mark.c == marks.LAUNCHED:
            step.device_async = True
        if mark.kind in _CALLS or mark.c == marks.ON_DEVICE or not (mark.c or step.device_timed):
            setattr(step, _STEP_FIELDS[mark.kind], (mark.a, mark.b))
        step.device_timed |= mark.c == marks.ON_DEVICE
        if step.update_ns is not None:  # the engine's ring was read first: what was made of the step is to be renewed
            self.fresh_steps.append(mark.key)


_ROOT_FIELDS: dict[int, tuple[str, type]] = {
    marks.HANDLER: ("handler", Mark),
    marks.RENDER: ("render", Mark),
    marks.TOKENIZE: ("tokenize", list),
    marks.TOKENIZE_RUN: ("tokenize_run", int),
    marks.TOKENIZED: ("tokenized", list),
    marks.STATUS: ("status", Mark),
    marks.FAILED: ("failure", Mark),
    marks.BACKGROUND: ("background", int),
    marks.FIRST_TEXT: ("first_text", int),
    marks.SENT: ("sent", int),
    marks.DISCONNECT: ("disconnect", int),
    marks.END: ("end", Mark),
}
_SEQUENCE_FIELDS: dict[int, tuple[str, type]] = {
    marks.SAMPLING: ("sampling", Mark),
    marks.STOPPED: ("stopped", int),
    marks.FINISHED: ("finished", Mark),
    marks.ABORTED: ("aborted", int),
    marks.ARRIVE: ("arrived", int),
    marks.FREE: ("free", Mark),
}
_SEQUENCE_LISTS = (marks.LOOKUP, marks.BLOCKS, marks.JOIN, marks.LEAVE, marks.TOKENS, marks.PREEMPT)
_STEP_FIELDS: dict[int, str] = {
    marks.EXECUTE: "execute_ns",
    marks.FORWARD: "forward_ns",
    marks.LM_HEAD: "lm_head_ns",
    marks.SAMPLE_CALL: "sample_call_ns",
    marks.SAMPLE: "sample_ns",
    marks.EMBEDDING: "embedding_ns",
}
#: The engine's calls, which are over when they return, whatever they have launched.
_CALLS = (marks.EXECUTE, marks.SAMPLE_CALL)
_ENGINE_KINDS = frozenset(kind for kind in (*_SEQUENCE_FIELDS, *_SEQUENCE_LISTS) if kind >= marks.ARRIVE)
