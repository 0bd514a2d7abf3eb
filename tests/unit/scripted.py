"""An engine of marks: it plays requests through a server that exists on paper only, and knows the truth about them.

:class:`Script` composes steps as a continuously batching engine does, on a clock of its own, and writes the marks that
the hooks would have written. While doing so it notes in :attr:`Seq.truth` when each stage really was.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from stagetrace import marks
from stagetrace.assemble import Assembler
from stagetrace.marks import Mark, TextMark, key_of, signed
from stagetrace.model import RequestRecord

US, MS = 1_000, 1_000_000
API, CORE, WORKER = 101, 102, 103
#: Rings by name: (process, whether it is the process's main thread).
MAIN, POOL, INPUT, ENGINE, DEVICE = ("main", API), ("pool", API), ("input", CORE), ("engine", CORE), ("device", WORKER)
COPY = ("copy", WORKER)
ENGINE_NUMBER = 7
STOP, LENGTH, ABORT = 1, 2, 3


@dataclass
class Ask:
    """One call of a client. Times in ns; ``kind`` is chat, completion, embedding, offline or direct."""

    at: int = 0
    prompt: int = 20
    output: int = 6
    kind: str = "chat"
    stream: bool = True
    n: int = 1
    cached: int = 0
    identifier: str = ""
    #: Look-ups that find no blocks before one does.
    blocked: int = 0
    #: Times its turn comes before its grammar is compiled.
    compiling: int = 0
    #: Answered this long after it was handed over, and worked for in the background.
    background: int | None = None
    #: Evict when this many tokens are generated (0: while in prefill), and keep out for ``out`` steps.
    evict: tuple[int, ...] = ()
    out: int = 2
    #: Pass over in one step when this many tokens are generated.
    skip: tuple[int, ...] = ()
    #: The stop string is complete with this token; the engine hears of it ``stop_lag`` steps later.
    stop_at: int | None = None
    stop_lag: int = 2
    #: Tokens at the start that have no text yet.
    silent: int = 0
    #: How much longer every further send takes to get done.
    slower: int = 0
    abort_at: int | None = None
    #: Refused where: "body", "tokenize" or "parameters"; with which HTTP status; by which exception.
    refuse: str | None = None
    answer: int = 400
    raises: str | None = None
    traceparent: str | None = None
    tracestate: str | None = None


@dataclass
class Seq:
    """One engine request of an ask. ``truth`` is (start, duration) by stage."""

    ask: Ask
    root: int
    number: int
    internal_id: str
    added: int
    computed: int = 0
    generated: int = 0
    #: Tokens that steps in flight are going to make.
    coming: int = 0
    state: str = "away"
    hold: int = 0
    freed: int | None = None
    stopped: int | None = None
    delivered: int = 0
    first_text: int | None = None
    evictions: list[int] = field(default_factory=list)
    skipped: set[int] = field(default_factory=set)
    token_times: list[int] = field(default_factory=list)
    truth: dict[str, tuple[int, int]] = field(default_factory=dict)
    stop_seen: int = 0
    refused: int = 0
    ran: bool = False

    @property
    def over(self) -> bool:
        return self.freed is not None


@dataclass
class Step:
    number: int
    schedule: tuple[int, int]
    #: (sequence, tokens, computed before, whether it finishes what is known)
    rows: list[tuple[Seq, int, int, bool]]
    forward: tuple[int, int] = (0, 0)
    embedding: tuple[int, int] = (0, 0)
    lm_head: tuple[int, int] = (0, 0)
    sample: tuple[int, int] = (0, 0)
    result: int = 0
    update: tuple[int, int] = (0, 0)


@dataclass
class Root:
    ask: Ask
    number: int
    started: int
    seqs: list[Seq] = field(default_factory=list)
    sends: list[int] = field(default_factory=list)
    first_text: int | None = None
    status: int | None = None
    ended: int | None = None
    gone: bool = False


Written = tuple[int, tuple[str, int], Mark | TextMark]


class Script:
    """Ask for requests, :meth:`run`, then :meth:`records`. ``depth`` 2 is asynchronous scheduling.

    ``device`` says what times the worker's computing: the ``host`` that does it, one that only ``launches`` it on a
    device, or ``events`` of that device, which are read when the result is there.
    """

    def __init__(
        self, *, depth: int = 1, budget: int = 64, slots: int = 8, embedding: str = "watched",
        device: str = "host", drafts: int = 0, accepted: tuple[int, ...] = (3, 1, 2),
        engine_dies: int | None = None, settings: dict[str, str] | None = None, against: str | None = None,
    ) -> None:  # fmt: skip
        self.depth, self.budget, self.slots = depth, budget, slots
        self.embedding, self.device = embedding, device
        self.drafts, self.accepted, self.engine_dies = drafts, accepted, engine_dies
        self.written: list[Written] = []
        self.roots: list[Root] = []
        self.steps: list[Step] = []
        self.dead: set[int] = set()
        self._members: dict[int, int] = {}
        self._idle = True
        self._worker_free = self._api_free = 0
        self._accepts = 0
        for key, value in {
            "engine": "paper", "engine_version": "1", "model": "tiny", "block_size": 16, "kv_blocks": 100,
            "kv_block_bytes": 4096, "max_num_seqs": slots, "max_num_batched_tokens": budget, "vocabulary": 500,
        }.items():  # fmt: skip
            self._text(ENGINE, 0, marks.ENGINE, 0, f"{key}={value}")
        self.against = against
        for key, value in (settings or {}).items():
            self._text(ENGINE, 0, marks.ENGINE, 0, f"{key}={value}")
        if embedding == "fused":
            self._text(DEVICE, 0, marks.ENGINE, 0, "embedding=fused")

    # What tests call.

    def run(self, *asks: Ask) -> Script:
        """Play ``asks`` to their end."""
        for index, ask in enumerate(asks):
            self._front_end(ask, index)
        self._engine()
        return self

    def read(
        self, shuffle: int | None = None, drop: Callable[[Mark], bool] = lambda mark: False
    ) -> Iterator[tuple[Mark | TextMark, int]]:
        """The marks with their process: by time, or ring by ring in any interleaving."""
        rings: dict[tuple[str, int], list[Written]] = {}
        for written in sorted(self.written, key=lambda w: w[0]):
            if isinstance(written[2], TextMark) or not drop(written[2]):
                rings.setdefault(written[1], []).append(written)
        if shuffle is None:
            order = sorted((w for ring in rings.values() for w in ring), key=lambda w: w[0])
            yield from ((mark, ring[1]) for _, ring, mark in order)
            return
        chance = random.Random(shuffle)
        queues = [deque(ring) for _, ring in sorted(rings.items())]
        while queues:
            queue = chance.choice(queues)
            for _ in range(min(chance.choice((1, 3, 50)), len(queue))):
                _, ring, mark = queue.popleft()
                yield mark, ring[1]
            queues = [q for q in queues if q]

    def assembler(self) -> Assembler:
        made = Assembler(lambda pid: pid not in self.dead, self.against)
        made.anchors[API] = (0, 1_700_000_000 * 10**9)
        return made

    def records(
        self, shuffle: int | None = None, drop: Callable[[Mark], bool] = lambda mark: False
    ) -> list[RequestRecord]:
        """What assembly makes of it all, in the order of the asks."""
        assembler = self.assembler()
        for mark, pid in self.read(shuffle, drop):
            assembler.take(mark, pid)
        return self.settle(assembler)

    def settle(self, assembler: Assembler) -> list[RequestRecord]:
        assembler.steps()
        late = max(w[0] for w in self.written) + 3_000 * MS
        found = assembler.finished(late) + assembler.finished(late + 200 * MS) + assembler.in_flight()
        order = {f"{root.number:016x}": index for index, root in enumerate(self.roots)}
        return sorted(found, key=lambda r: (order[r.span_id], r.sequence))

    def change(self, kind: int, change: Callable[[Mark], Mark]) -> None:
        """Have marks of ``kind`` say something else."""
        self.written = [
            (t, ring, change(mark) if isinstance(mark, Mark) and mark.kind == kind else mark)
            for t, ring, mark in self.written
        ]

    def kill(self, at: int, *pids: int) -> None:
        """Nothing of these processes is written after ``at``."""
        self.written = [w for w in self.written if w[1][1] not in pids or w[0] <= at]
        self.dead.update(pids)

    def _numbers(self) -> set[int]:
        return {root.number for root in self.roots}

    # The front end.

    def _mark(self, ring: tuple[str, int], t: int, kind: int, key: int, *payload: int) -> None:
        self.written.append((t, ring, Mark(t, kind, key, *(*payload, 0, 0, 0, 0)[:4])))

    def _text(self, ring: tuple[str, int], t: int, field: int, key: int, text: str) -> None:
        self.written.append((t, ring, TextMark(t, field, key, text)))

    def _front_end(self, ask: Ask, index: int) -> None:
        number = 0x1000 + index
        operation = {"chat": 1, "completion": 2, "embedding": 4}.get(ask.kind, 3)
        origin = {"offline": marks.OFFLINE, "direct": marks.DIRECT}.get(ask.kind, marks.HTTP)
        root = Root(ask, number, ask.at)
        self.roots.append(root)
        http = origin == marks.HTTP
        t = ask.at
        script: list[tuple[int, tuple[str, int], int, tuple[int, ...]]] = []
        self._mark(MAIN, t, marks.ROOT, number, 1, number, operation, origin)
        if http:
            self._text(MAIN, t, marks.ROUTE, number, "/v1/" + ask.kind)
            if ask.traceparent:
                self._text(MAIN, t, marks.TRACEPARENT, number, ask.traceparent)
            if ask.tracestate:
                self._text(MAIN, t, marks.TRACESTATE, number, ask.tracestate)
            if ask.refuse != "body":
                script.append((t := t + 400 * US, MAIN, marks.HANDLER, (200, int(ask.stream), ask.n, ask.output)))
        if ask.kind == "chat" and ask.refuse != "body":
            script.append((t := t + 50 * US, MAIN, marks.RENDER, (2,)))
        if ask.kind != "direct" and ask.refuse != "body":
            script.append((t := t + 300 * US, MAIN, marks.TOKENIZE, (ask.prompt * 4,)))
            script.append((t := t + 30 * US, POOL, marks.TOKENIZE_RUN, ()))
            if ask.refuse != "tokenize":
                script.append((t := t + 500 * US, MAIN, marks.TOKENIZED, (ask.prompt,)))
        for when, ring, kind, payload in script:
            if ask.abort_at is None or when <= ask.abort_at:
                self._mark(ring, when, kind, number, *payload)
        t += 80 * US if ask.kind != "direct" else 0
        if ask.refuse:
            self._answer(root, t, ask.answer)
        elif ask.abort_at is not None and ask.abort_at < t:
            self._disconnect(root, ask.abort_at)
        else:
            self._add(root, t, {kind: when for when, _, kind, _ in script})

    def _add(self, root: Root, t: int, seen: dict[int, int]) -> None:
        ask = root.ask
        for index in range(ask.n):
            internal = f"{index}_{ask.identifier or root.number}"
            seq = Seq(ask, root.number, key_of(internal), internal, t + index * 20 * US, hold=ask.compiling)
            root.seqs.append(seq)
            limit = -1 if ask.kind == "embedding" else ask.output
            self._mark(MAIN, seq.added, marks.ADD, root.number, signed(seq.number), ask.prompt, limit, index)
            self._text(MAIN, seq.added, marks.INTERNAL_ID, seq.number, internal)
            self._text(MAIN, seq.added, marks.EXTERNAL_ID, root.number, f"cmpl-{root.number}")
            if limit >= 0:
                grammar = int(ask.compiling > 0)
                self._mark(MAIN, seq.added, marks.SAMPLING, seq.number, 700_000, 1_000_000, 0, grammar)
            self._mark(INPUT, seq.added + 100 * US, marks.ARRIVE, seq.number)
            if marks.HANDLER in seen:
                seq.truth["http_receive"] = (root.started, seen[marks.HANDLER] - root.started)
            if marks.RENDER in seen:
                seq.truth["chat_template"] = (seen[marks.RENDER], seen[marks.TOKENIZE] - seen[marks.RENDER])
            if marks.TOKENIZE in seen:
                seq.truth["tokenize"] = (seen[marks.TOKENIZE], seen[marks.TOKENIZED] - seen[marks.TOKENIZE])

        if ask.background is not None:
            self._mark(MAIN, t, marks.BACKGROUND, root.number)
            self._answer(root, t + ask.background, 200)

    def _answer(self, root: Root, t: int, status: int) -> None:
        self._mark(MAIN, t, marks.STATUS, root.number, status)
        self._send(root, t + 30 * US)
        self._send(root, t + 50 * US, size=0)
        if root.ask.raises:
            self._text(MAIN, t + 90 * US, marks.ERROR, root.number, root.ask.raises)
        self._end(root, t + 90 * US, failed=int(root.ask.raises is not None))

    def _send(self, root: Root, t: int, size: int = 100) -> int:
        t = max(t, root.sends[-1] if root.sends else 0)
        root.sends.append(t)
        self._mark(MAIN, t, marks.SENT, root.number, size)
        return t

    def _end(self, root: Root, t: int, failed: int = 0) -> None:
        root.ended = t
        if root.ask.kind != "direct":
            self._mark(MAIN, t, marks.END, root.number, failed)

    def _disconnect(self, root: Root, t: int) -> None:
        """The client goes away, or the caller cancels."""
        root.gone = True
        if root.ask.kind not in ("offline", "direct"):
            self._mark(MAIN, t, marks.DISCONNECT, root.number)
        for seq in root.seqs:
            self._mark(MAIN, t + 5 * US, marks.ABORTED, seq.number)
        self._end(root, t + 10 * US, failed=int(root.ask.kind == "offline"))

    def _departs(self, root: Root, t: int) -> bool:
        """Whether the client is gone at ``t``."""
        at = root.ask.abort_at
        if at is not None and at <= t and not root.gone and root.ended is None:
            self._disconnect(root, at)
        return root.gone

    # The engine.

    def _engine(self) -> None:
        t, flight = 0, deque[Step]()
        while self.engine_dies is None or t < self.engine_dies:
            self._intake(t)
            step = self._compose(t) if len(flight) < self.depth else None
            if step is not None:
                self._execute(step)
                flight.append(step)
                t = step.schedule[1] + 10 * US
                if len(flight) < self.depth:
                    continue
            if flight:
                done = flight.popleft()
                t = self._update(done, max(t, done.result)) + 40 * US
            elif (coming := min(self._events(), default=None)) is not None:
                t = max(t + 10 * US, coming)
            else:
                return
        self._die()

    def _sequences(self) -> Iterator[tuple[Root, Seq]]:
        yield from ((root, seq) for root in self.roots for seq in root.seqs if not seq.over)

    def _events(self) -> Iterator[int]:
        """What is still to happen: anything that keeps the engine from being idle for good."""
        for root, seq in self._sequences():
            yield seq.added + 200 * US if seq.state == "away" else 0
            if root.ask.abort_at is not None and not root.gone:
                yield root.ask.abort_at

    def _intake(self, t: int) -> None:
        for root, _ in self._sequences():
            self._departs(root, t)
        for root, seq in list(self._sequences()):
            if seq.state == "away" and seq.added + 200 * US <= t:
                waiting = sum(s.state == "waiting" for _, s in self._sequences())
                running = sum(s.state == "running" for _, s in self._sequences())
                self._mark(ENGINE, t, marks.ENQUEUE, seq.number, waiting, running, int(seq.ask.compiling > 0))
                seq.state = "waiting"
            heard = root.gone and root.ask.abort_at is not None and root.ask.abort_at + 100 * US <= t
            if seq.state != "away" and (heard or self._stop_heard(seq)):
                self._free(seq, t, ABORT)

    def _stop_heard(self, seq: Seq) -> bool:
        return seq.stopped is not None and len(self.steps) >= seq.stop_seen + seq.ask.stop_lag

    def _free(self, seq: Seq, t: int, code: int) -> None:
        seq.freed, seq.state = t, "done"
        held = -(-(seq.computed or 1) // 16)
        self._mark(ENGINE, t, marks.FREE, seq.number, code, seq.generated, held | 1 << 32, held - 1)

    def _compose(self, t: int) -> Step | None:
        """One schedule(): evictions, then those that run, then those that wait."""
        left = self.budget
        rows: list[tuple[Seq, int, int, bool]] = []
        fresh: set[int] = set()
        for _, seq in self._sequences():
            if seq.state == "running":
                left -= self._go_on(seq, t, left, rows)
        for _, seq in self._sequences():
            if (
                seq.state == "waiting"
                and left > 0
                and sum(s.state == "running" for _, s in self._sequences()) < self.slots
            ):
                if seq.hold:
                    seq.hold -= 1
                elif self._admit(seq, t):
                    fresh.add(seq.number)
                    left -= self._go_on(seq, t, left, rows)
        if not rows and (self._idle or any(seq.state == "running" for _, seq in self._sequences())):
            return None
        self._idle = not rows  # one empty step when nothing runs any more
        step = Step((ENGINE_NUMBER << 32) + len(self.steps) + 1, (t, t + 100 * US), rows)
        self.steps.append(step)
        self._write_step(step, fresh)
        return step

    def _go_on(self, seq: Seq, t: int, left: int, rows: list[tuple[Seq, int, int, bool]]) -> int:
        """Schedule a running sequence; return the tokens it takes."""
        if seq.generated in seq.ask.evict and seq.generated not in seq.evictions and seq.ran:
            seq.evictions.append(seq.generated)
            self._mark(ENGINE, t + 5 * US, marks.PREEMPT, seq.number)
            seq.computed, seq.state, seq.hold = 0, "waiting", seq.ask.out
            return 0
        if seq.ran and seq.generated in seq.ask.skip and seq.generated not in seq.skipped:
            seq.skipped.add(seq.generated)
            return 0
        need = seq.ask.prompt + seq.generated + seq.coming - seq.computed
        drafts = self.drafts if need == 1 and seq.generated else 0
        tokens = min(need + drafts, left)
        if tokens <= 0 or seq.generated + seq.coming > seq.ask.output:
            return 0
        whole = tokens >= need
        rows.append((seq, tokens, seq.computed, whole))
        seq.ran = True
        seq.computed += tokens
        seq.coming += whole
        return tokens

    def _admit(self, seq: Seq, t: int) -> bool:
        """Look the prefix up and, unless there are no blocks, take the sequence in."""
        again = bool(seq.evictions)
        looked = t + 20 * US
        self._mark(ENGINE, looked, marks.LOOKUP, seq.number)
        if seq.refused < seq.ask.blocked:
            seq.refused += 1
            return False
        self._mark(ENGINE, looked + 40 * US, marks.BLOCKS, seq.number)
        seq.computed = min(seq.ask.cached, seq.ask.prompt - 1)
        seq.state = "running"
        if not again:
            seq.truth["admission"] = (seq.added, looked - seq.added)
            seq.truth["kv_allocate"] = (looked, 40 * US)
        return True

    def _write_step(self, step: Step, fresh: set[int]) -> None:
        entered, end = step.schedule
        total = sum(tokens for _, tokens, _, _ in step.rows)
        running = sum(s.state == "running" for _, s in self._sequences())
        waiting = sum(s.state == "waiting" for _, s in self._sequences())
        self._mark(
            ENGINE,
            end,
            marks.STEP,
            step.number,
            entered,
            len(step.rows) | total << 32,
            running | waiting << 32,
            250_000,
        )
        now = {seq.number: tokens for seq, tokens, _, _ in step.rows}
        for seq, tokens, computed, _ in step.rows:
            if self._members.get(seq.number) == tokens == 1 and seq.number not in fresh:
                continue
            prefill = int(computed < seq.ask.prompt)
            blocks = -(-tokens // 16)
            self._mark(ENGINE, end, marks.JOIN, seq.number, step.number, tokens, computed, blocks | prefill << 32)
        for number in self._members.keys() - now.keys():
            self._mark(ENGINE, end, marks.LEAVE, number, step.number)
        self._members = now

    def _execute(self, step: Step) -> None:
        """The worker's part."""
        if not step.rows:
            step.result = max(step.schedule[1] + 50 * US, self._worker_free)
            return
        total = sum(tokens for _, tokens, _, _ in step.rows)
        start = max(step.schedule[1] + 50 * US, self._worker_free)
        forward = start + 150 * US
        step.embedding = (forward + 10 * US, forward + 60 * US)
        step.forward = (forward, forward + 2 * MS + total * 40 * US)
        step.lm_head = (step.forward[1], step.forward[1] + 200 * US)
        executed = step.lm_head[1] + 10 * US
        called = executed + 20 * US
        step.sample = (called + 30 * US, called + 180 * US)
        left = step.sample[1] + 20 * US
        self._worker_free, step.result = left, left + 40 * US
        calls = {marks.EXECUTE: (start, executed), marks.SAMPLE_CALL: (called, left)}
        if self.device == "events":  # the calls have returned when the device has just begun
            calls = {marks.EXECUTE: (start, start + 60 * US), marks.SAMPLE_CALL: (start + 70 * US, start + 100 * US)}
        self._write_worker(step, calls, total)

    def _write_worker(self, step: Step, calls: dict[int, tuple[int, int]], rows: int) -> None:
        for kind, span in calls.items():
            self._mark(DEVICE, span[1], kind, step.number, *span, int(self.device != "host"))
        clock = {"host": 0, "launches": marks.LAUNCHED, "events": marks.ON_DEVICE}[self.device]
        spans = {marks.FORWARD: step.forward, marks.LM_HEAD: step.lm_head, marks.SAMPLE: step.sample}
        if self.embedding == "watched":
            spans[marks.EMBEDDING] = step.embedding
        for kind, span in spans.items():
            number = rows if kind == marks.EMBEDDING else 0
            ring, t = (COPY, step.result) if self.device == "events" else (DEVICE, span[1])
            self._mark(ring, t, kind, step.number, *span, clock, number)

    def _update(self, step: Step, t: int) -> int:
        step.update = (t, t + 120 * US)
        got: list[tuple[Seq, int]] = []
        for seq, tokens, computed, whole in step.rows:
            seq.coming -= whole
            if seq.over or not whole:
                continue
            if "prefill" not in seq.truth and not seq.generated:
                self._first_token(seq, step)
            if seq.ask.kind == "embedding":
                got.append((seq, 0))
                self._free(seq, t + 40 * US, STOP)
                continue
            drafted = seq.generated > 0 and computed == seq.ask.prompt + seq.generated - 1 and tokens > 1
            new = self._draw(tokens) if drafted else 1
            if drafted:
                if seq.state == "running":
                    seq.computed -= tokens - new  # the rejected drafts
                if new != 1:
                    self._mark(ENGINE, t + 30 * US, marks.TOKENS, seq.number, step.number, new)
            new = min(new, seq.ask.output - seq.generated)
            seq.generated += new
            got.append((seq, new))
            if seq.generated >= seq.ask.output:
                self._free(seq, t + 40 * US, LENGTH)
        self._mark(ENGINE, step.update[1], marks.UPDATE, step.number, t, len(got))
        if got:
            self._deliver(step, got)
        return step.update[1]

    def _draw(self, tokens: int) -> int:
        """How many tokens of a speculative step are accepted."""
        self._accepts += 1
        return min(self.accepted[self._accepts % len(self.accepted)], tokens)

    def _first_token(self, seq: Seq, step: Step) -> None:
        chunks = [s for s in self.steps if any(row[0] is seq for row in s.rows) and s.number <= step.number]
        inside = sum(b - a for s in chunks for a, b in [s.embedding]) if self.embedding == "watched" else 0
        computing = sum(s.forward[1] - s.forward[0] for s in chunks)
        seq.truth["prefill"] = (chunks[0].forward[0], computing - inside)
        if self.embedding == "watched":
            seq.truth["embedding"] = (chunks[0].embedding[0], inside)
        if seq.ask.kind == "embedding":
            return
        seq.truth["lm_head"] = (step.lm_head[0], step.lm_head[1] - step.lm_head[0])
        seq.truth["sample"] = (step.sample[0], step.sample[1] - step.sample[0])

    # The way back.

    def _deliver(self, step: Step, got: list[tuple[Seq, int]]) -> None:
        """The front end detokenises the step's tokens and sends what it has."""
        entered = max(step.update[1] + 80 * US, self._api_free)
        left = self._api_free = entered + 30 * US + 10 * US * len(got)
        # A float of seconds has carried the stamp: it is exact to a microsecond or so.
        stamp = int((step.update[0] + 60 * US) / 1e9 * 1e9)
        self._mark(MAIN, left, marks.OUTPUTS, 0, entered, left, stamp, len(got))
        for seq, new in got:
            root = next(r for r in self.roots if seq in r.seqs)
            if seq.stopped is None and root.ended is None and not self._departs(root, left):
                self._emit(root, seq, new, step, left)
        for root in self.roots:
            if root.seqs and root.ended is None and all(s.over or s.stopped is not None for s in root.seqs):
                self._finish(root, max(left, *root.sends, 0))

    def _emit(self, root: Root, seq: Seq, new: int, step: Step, left: int) -> None:
        ask, streams = root.ask, root.ask.stream and root.ask.kind in ("chat", "completion")
        sent = max(left + 100 * US + ask.slower * seq.delivered, *root.sends, 0) if streams else left
        if self._departs(root, sent) or not new:
            return
        seq.delivered += new
        if ask.stop_at is not None and seq.delivered >= ask.stop_at:
            seq.stopped, seq.stop_seen = left, len(self.steps)
            self._mark(MAIN, left, marks.STOPPED, seq.number)
        if streams:
            self._stream(root, seq, left, sent)
        single = streams and ask.n == 1
        seq.token_times += [sent if single else left] * new
        if seq.first_text is None and (not single or root.first_text is not None):
            seq.first_text = sent if single else left
            start = next(s for s in self.steps if any(r[0] is seq and r[3] for r in s.rows)).update[0]
            seq.truth["detokenize"] = (start, seq.first_text - start)

    def _stream(self, root: Root, seq: Seq, left: int, sent: int) -> None:
        if root.status is None:
            root.status = 200
            self._mark(MAIN, left + 50 * US, marks.STATUS, root.number, 200)
            if root.ask.kind == "chat":
                self._send(root, left + 60 * US)
        if root.first_text is None and seq.delivered > root.ask.silent:
            root.first_text = sent
            self._mark(MAIN, sent, marks.FIRST_TEXT, root.number)
        self._send(root, sent)

    def _finish(self, root: Root, t: int) -> None:
        """The last bytes, and what that makes of the two last stages."""
        if self._departs(root, t + 300 * US):
            return
        if root.ask.kind in ("offline", "direct"):
            self._end(root, t + 200 * US if root.ask.kind == "offline" else t)
        elif root.ask.stream:
            self._send(root, t + 20 * US, size=14)
            self._send(root, t + 30 * US, size=0)
            self._end(root, t + 60 * US)
        else:
            self._answer(root, t + 100 * US, 200)
        last = root.sends[-1] if root.sends else root.ended or t
        for seq in root.seqs:
            done = min(x for x in (seq.stopped, seq.freed) if x is not None)
            first = seq.first_text
            if first is None:  # a stream without any text in it, or nothing was to be generated
                if root.ask.kind == "embedding":
                    seq.truth["teardown"] = (done, last - done)
                continue
            if seq.delivered > 1:
                seq.truth["decode"] = (first, max(done, first) - first)
            seq.truth["teardown"] = (max(done, first), last - max(done, first))

    def _die(self) -> None:
        """The engine is gone, and with it what it would have written; who was in it gets an error."""
        at = self.engine_dies or 0
        self.dead |= {CORE, WORKER}
        answers = (marks.OUTPUTS, marks.STOPPED, marks.STATUS, marks.FIRST_TEXT, marks.SENT, marks.END)
        hit = {root.number: root for root in self.roots if root.seqs and (root.ended is None or root.ended > at)}
        self.written = [
            (t, ring, mark)
            for t, ring, mark in self.written
            if t <= at
            or (ring[1] == API and (isinstance(mark, TextMark) or mark.kind not in answers))
            or (ring[1] == API and mark.key in self._numbers() - hit.keys())
        ]
        for root in hit.values():
            root.sends = [t for t in root.sends if t <= at]
            if root.ask.kind in ("offline", "direct"):
                self._end(root, max(at, root.seqs[-1].added) + MS, failed=1)
            elif root.sends:
                self._send(root, at + MS)
                self._end(root, at + 2 * MS)
            else:
                self._answer(root, max(at, root.seqs[-1].added) + MS, 500)


def kinds(*which: int) -> Callable[[Mark], bool]:
    """For ``drop``: marks of these kinds, as if their hooks had not been there."""
    chosen: Iterable[int] = frozenset(which)
    return lambda mark: mark.kind in chosen
