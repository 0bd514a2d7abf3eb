"""What the marks have said so far: roots, sequences and steps, keyed by their 64-bit numbers."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field

from .. import marks
from ..marks import Mark, TextMark
from ..model import StepRecord

Span = tuple[int, int]


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
    texts: dict[int, str] = field(default_factory=dict)
    handler: Mark | None = None
    render: Mark | None = None
    tokenize: Mark | None = None
    tokenize_run: int | None = None
    tokenized: Mark | None = None
    sequences: list[int] = field(default_factory=list)
    status: Mark | None = None
    first_text: int | None = None
    sent: list[int] = field(default_factory=list)
    disconnect: int | None = None
    end: Mark | None = None
    #: Collector's clock when nothing more was expected of it.
    settled: int | None = None


@dataclass
class Sequence:
    """One engine request. ``joins`` are (step, tokens, computed before, new blocks); ``leaves`` are steps."""

    number: int
    root: int | None = None
    engine_pid: int | None = None
    added: Mark | None = None
    index: int = 0
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
    aborted: int | None = None


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
        self.sequences: dict[int, Sequence] = {}
        self.steps: dict[int, StepRecord] = {}
        self.outputs: dict[int, Outputs] = {}
        self.settings: dict[str, str] = {}
        self.hooks: dict[int, dict[str, str]] = {}
        self.fresh_steps: list[int] = []
        self._worker: dict[int, list[Mark]] = {}
        self._take: dict[int, Callable[[Mark, int], None]] = {
            marks.ROOT: self._root,
            marks.ADD: self._add,
            marks.OUTPUTS: lambda m, pid: self.outputs.setdefault(pid, Outputs()).add(m),
            marks.STEP: self._step,
            marks.UPDATE: self._update,
            **dict.fromkeys(_ROOT_FIELDS, self._on_root),
            **dict.fromkeys(_SEQUENCE_FIELDS, self._on_sequence),
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

    def sequence(self, number: int) -> Sequence:
        """The sequence of that number; a new one if its id was used before and has ended."""
        known = self.sequences.get(number)
        if known is None:
            known = self.sequences[number] = Sequence(number)
        return known

    def forget(self, root: Root) -> None:
        """Drop a root that has been written out, and its sequences."""
        self.roots.pop(root.number, None)
        for number in root.sequences:
            known = self.sequences.get(number)
            if known is not None and known.root == root.number:
                del self.sequences[number]

    def forget_before(self, time: int) -> None:
        """Drop steps and batches that no live request can refer to any more."""
        old = [n for n, s in self.steps.items() if s.schedule_ns[1] < time]
        for number in old:
            del self.steps[number]
        for outputs in self.outputs.values():
            outputs.forget(time)
        for number in [n for n, ms in self._worker.items() if ms[0].t < time]:
            del self._worker[number]

    def _text(self, mark: TextMark, pid: int) -> None:
        if mark.field == marks.ENGINE:
            key, _, value = mark.text.partition("=")
            self.settings[key] = value
        elif mark.field == marks.HOOK:
            target, _, state = mark.text.partition(" ")
            self.hooks.setdefault(pid, {})[target] = state
        elif mark.field == marks.INTERNAL_ID:
            self.sequence(mark.key).internal_id = mark.text
        elif mark.key in self.roots:
            self.roots[mark.key].texts[mark.field] = mark.text

    def _root(self, mark: Mark, pid: int) -> None:
        trace = f"{marks.unsigned(mark.a):016x}{marks.unsigned(mark.b):016x}"
        self.roots[mark.key] = Root(mark.key, pid, mark.t, trace, mark.c, mark.d != marks.HTTP, mark.d == marks.DIRECT)

    def _on_root(self, mark: Mark, _pid: int) -> None:
        root = self.roots.get(mark.key)
        if root is None:
            return
        name, value = _ROOT_FIELDS[mark.kind]
        if name == "sent":
            root.sent.append(mark.t)
        else:
            setattr(root, name, mark if value is Mark else mark.t)

    def _add(self, mark: Mark, _pid: int) -> None:
        number = marks.unsigned(mark.a)
        sequence = self.sequence(number)
        if sequence.added is not None:  # an id that is used again: the earlier one is over
            sequence = self.sequences[number] = Sequence(number)
        sequence.root, sequence.added, sequence.index = mark.key, mark, mark.d
        if mark.key in self.roots:
            self.roots[mark.key].sequences.append(number)

    def _on_sequence(self, mark: Mark, pid: int) -> None:
        sequence = self.sequence(mark.key)
        kind = mark.kind
        if kind in _ENGINE_KINDS:
            sequence.engine_pid = pid
        if kind == marks.JOIN:
            sequence.joins.append((mark.a, mark.b, mark.c, mark.d & 0xFFFFFFFF))
            if mark.d >> 32 and mark.a in self.steps:
                self.steps[mark.a].prefill_tokens += mark.b
        elif kind == marks.LEAVE:
            sequence.leaves.append(mark.a)
        elif kind == marks.TOKENS:
            sequence.tokens[mark.a] = mark.b
        elif kind == marks.LOOKUP:
            # Only those of the first admission bound stage 4; there are many when a request is stuck.
            if sequence.blocks is None:
                sequence.lookups.append(mark.t)
        elif kind == marks.BLOCKS:
            if sequence.blocks is None and sequence.lookups:
                sequence.blocks = mark.t
        elif kind == marks.PREEMPT:
            sequence.preempted.append(mark.t)
        else:
            name, value = _SEQUENCE_FIELDS[kind]
            setattr(sequence, name, mark if value is Mark else mark.t)

    def _step(self, mark: Mark, _pid: int) -> None:
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
        )
        self.steps[mark.key] = step
        for early in self._worker.pop(mark.key, ()):
            self._on_step(early, 0)

    def _update(self, mark: Mark, _pid: int) -> None:
        step = self.steps.get(mark.key)
        if step is not None:
            step.update_ns = (mark.a, mark.t)
            self.fresh_steps.append(mark.key)

    def _on_step(self, mark: Mark, _pid: int) -> None:
        step = self.steps.get(mark.key)
        if step is None:  # the worker's ring was read before the engine's
            self._worker.setdefault(mark.key, []).append(mark)
            return
        setattr(step, _STEP_FIELDS[mark.kind], (mark.a, mark.b))
        if mark.c:
            step.device_async = True


_ROOT_FIELDS: dict[int, tuple[str, type]] = {
    marks.HANDLER: ("handler", Mark),
    marks.RENDER: ("render", Mark),
    marks.TOKENIZE: ("tokenize", Mark),
    marks.TOKENIZE_RUN: ("tokenize_run", int),
    marks.TOKENIZED: ("tokenized", Mark),
    marks.STATUS: ("status", Mark),
    marks.FIRST_TEXT: ("first_text", int),
    marks.SENT: ("sent", int),
    marks.DISCONNECT: ("disconnect", int),
    marks.END: ("end", Mark),
}
_SEQUENCE_FIELDS: dict[int, tuple[str, type]] = {
    marks.SAMPLING: ("sampling", Mark),
    marks.STOPPED: ("stopped", int),
    marks.ABORTED: ("aborted", int),
    marks.ARRIVE: ("arrived", int),
    marks.ENQUEUE: ("enqueued", Mark),
    marks.FREE: ("free", Mark),
    marks.LOOKUP: ("lookups", int),
    marks.BLOCKS: ("blocks", int),
    marks.JOIN: ("joins", int),
    marks.LEAVE: ("leaves", int),
    marks.TOKENS: ("tokens", int),
    marks.PREEMPT: ("preempted", int),
}
_STEP_FIELDS: dict[int, str] = {
    marks.EXECUTE: "execute_ns",
    marks.FORWARD: "forward_ns",
    marks.LM_HEAD: "lm_head_ns",
    marks.SAMPLE_CALL: "sample_call_ns",
    marks.SAMPLE: "sample_ns",
    marks.EMBEDDING: "embedding_ns",
}
_ENGINE_KINDS = frozenset(kind for kind in _SEQUENCE_FIELDS if kind >= marks.ARRIVE)
